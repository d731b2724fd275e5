//! Tests of requests whose prompts are computed on the prefill worker.

use crate::harness::{BLOCK_BYTES, Cluster, Setup, prompt};

#[tokio::test]
async fn remote_prefill_gives_the_tokens_of_local_prefill() {
    let cluster = Cluster::start(Setup::default(), Setup::default()).await;
    let alone = Cluster::start(Setup::default(), Setup::default()).await;
    for (number, len) in [(1, 1), (2, 2), (3, 16), (4, 17), (5, 33), (6, 100), (7, 1_000)] {
        let (mut remote, mut local) = (cluster.remote(prompt(number, len), 24), alone.local(prompt(number, len), 24));
        (remote.samples, local.samples) = (3, 3);
        let (remote, local) = (cluster.answer(remote).await, alone.answer(local).await);
        assert_eq!(remote.failure, None);
        assert_eq!(remote.tokens, local.tokens, "a prompt of {len}");
        let blocks = u64::from((len - 1).div_ceil(16));
        assert_eq!(remote.kv_transfer_bytes(), blocks * BLOCK_BYTES, "a prompt of {len}");
    }
    cluster.idle().await;
    let sent: u64 = [1_u64, 15, 16, 32, 99, 999].iter().map(|tokens| tokens.div_ceil(16) * BLOCK_BYTES).sum();
    for (worker, name, direction) in [(&cluster.prefill, "prefill-0", "sent"), (&cluster.decode, "decode-0", "received")] {
        let labels = format!(r#"{{worker="{name}",transport="tcp",direction="{direction}"}}"#);
        assert_eq!(worker.metric(&format!("tandem_worker_kv_transfer_bytes_total{labels}")), sent as f64);
        assert_eq!(worker.metric(&format!("tandem_worker_kv_transfer_duration_seconds_count{labels}")), 6.0);
    }
}

#[tokio::test]
async fn cached_tokens_are_those_of_the_prefill_worker_only() {
    let cluster = Cluster::start(Setup::default(), Setup::default()).await;
    // The decode worker has cached the whole prompt, and the prefill worker has cached none of it.
    cluster.answer(cluster.local(prompt(1, 100), 4)).await;
    let first = cluster.answer(cluster.remote(prompt(1, 100), 4)).await;
    assert_eq!(first.cached_tokens(), Some(0), "the decode worker's overlap does not count");
    let second = cluster.answer(cluster.remote(prompt(1, 100), 4)).await;
    assert_eq!(second.cached_tokens(), Some(96));
    cluster.idle().await;
    let counted = |worker: &str| format!(r#"tandem_worker_prompt_tokens_total{{worker="{worker}"}}"#);
    assert_eq!(cluster.decode.metric(&counted("decode-0")), 100.0);
    assert_eq!(cluster.prefill.metric(&counted("prefill-0")), 200.0);
    assert_eq!(cluster.prefill.metric(r#"tandem_worker_cached_tokens_total{worker="prefill-0",tier="device"}"#), 96.0);
}

#[tokio::test]
async fn blocks_cached_on_decode_are_not_transferred() {
    let cluster = Cluster::start(Setup::default(), Setup::default()).await;
    let cold = cluster.answer(cluster.remote(prompt(1, 100), 4)).await;
    assert_eq!((cold.kv_transfer_bytes(), cold.prefilled_tokens()), (7 * BLOCK_BYTES, 99));
    let warm = cluster.answer(cluster.remote(prompt(1, 100), 4)).await;
    assert_eq!(warm.kv_transfer_bytes(), BLOCK_BYTES, "only the incomplete block is transferred");
    assert_eq!(warm.tokens, cold.tokens);
    let longer: Vec<u32> = prompt(1, 64).into_iter().chain(prompt(9, 65)).collect();
    let longer = cluster.answer(cluster.remote(longer, 4)).await;
    assert_eq!((longer.cached_tokens(), longer.kv_transfer_bytes()), (Some(64), 4 * BLOCK_BYTES));
    // The first 96 of 97 tokens fill blocks that the decode worker has cached, so no block is sent.
    let whole = cluster.answer(cluster.remote(prompt(1, 97), 4)).await;
    assert_eq!((whole.cached_tokens(), whole.kv_transfer_bytes(), whole.chunks), (Some(96), 0, None));
    cluster.idle().await;
}

#[tokio::test]
async fn concurrent_requests_get_the_same_answers_as_single_requests() {
    let cluster = Cluster::start(Setup::default(), Setup::default()).await;
    let alone = Cluster::start(Setup::default(), Setup::default()).await;
    let requests = (0..24).map(|number| cluster.answer(cluster.remote(prompt(number, 40 + number * 13), 16)));
    let answers = futures::future::join_all(requests).await;
    for (number, answer) in (0..).zip(answers) {
        let expected = alone.answer(alone.local(prompt(number, 40 + number * 13), 16)).await;
        assert_eq!(answer.tokens, expected.tokens, "request {number}");
    }
    cluster.idle().await;
}

#[tokio::test]
async fn blocks_are_transferred_while_later_chunks_are_computed() {
    // A chunk of 64 tokens takes 320 ms. The blocks of the first of 4 chunks must be written long before the last chunk is computed.
    let cluster = Cluster::start(Setup::slow(), Setup::default()).await;
    let answer = cluster.answer(cluster.remote(prompt(1, 257), 1)).await;
    let started = answer.started.expect("decode has started");
    assert!(started.kv_transfer_ms > 600.0, "the first block was written {} ms before the last", started.kv_transfer_ms);
    cluster.idle().await;
}
