//! Tests of requests whose prompts are computed on the decode worker, and of the descriptions and caches that workers report.

use crate::harness::{Cluster, Setup, TIMEOUT, prompt};
use tandem_kv::{HashKey, KvBatch, Namespace, sequence_hashes};
use tandem_proto::{
    SnapshotAssembly,
    v1::{FailureReason, WatchRequest, control_client::ControlClient, finished::FinishReason, watch_reply, worker_info::Role},
};
use tonic::Code;

#[tokio::test]
async fn repeated_prompt_reports_its_cached_tokens_and_has_the_same_answer() {
    let cluster = Cluster::start(Setup::default(), Setup::default()).await;
    let cold = cluster.answer(cluster.local(prompt(1, 100), 20)).await;
    assert_eq!((cold.cached_tokens(), cold.kv_transfer_bytes()), (Some(0), 0));
    assert_eq!(cold.scheduled.as_ref().expect("Scheduled was sent").cached_tokens_by_tier["device"], 0);
    assert_eq!(cold.prefilled_tokens(), 99, "the first decode step computes the last prompt token");
    let warm = cluster.answer(cluster.local(prompt(1, 100), 20)).await;
    assert_eq!((warm.cached_tokens(), warm.prefilled_tokens()), (Some(96), 3));
    assert_eq!(warm.scheduled.as_ref().expect("Scheduled was sent").cached_tokens_by_tier["device"], 96);
    assert_eq!(warm.tokens, cold.tokens, "the cache never changes the answer");
    assert_eq!(cold.finished[&0].reason(), FinishReason::Length);
    assert_eq!(cold.tokens[&0].len(), 20);
    cluster.idle().await;
    for (series, value) in [
        (r#"tandem_worker_prefix_cache_requests_total{worker="decode-0",result="hit"}"#, 1.0),
        (r#"tandem_worker_prefix_cache_requests_total{worker="decode-0",result="miss"}"#, 1.0),
        (r#"tandem_worker_prompt_tokens_total{worker="decode-0"}"#, 200.0),
        (r#"tandem_worker_cached_tokens_total{worker="decode-0",tier="device"}"#, 96.0),
    ] {
        assert_eq!(cluster.decode.metric(series), value, "{series}");
    }
}

#[tokio::test]
async fn samples_equal_separate_requests_and_the_prompt_counts_once() {
    let cluster = Cluster::start(Setup::default(), Setup::default()).await;
    let mut three = cluster.local(prompt(1, 50), 12);
    three.samples = 3;
    let three = cluster.answer(three).await;
    assert_eq!(three.finished.len(), 3);
    for sample in 0..3 {
        let mut one = cluster.local(prompt(1, 50), 12);
        one.sampling.as_mut().expect("the field is set").seed += u64::from(sample);
        assert_eq!(cluster.answer(one).await.tokens[&0], three.tokens[&sample]);
    }
    assert_eq!(cluster.decode.metric(r#"tandem_worker_prompt_tokens_total{worker="decode-0"}"#), 200.0);
}

#[tokio::test]
async fn preempted_prompt_is_reported_and_counted_once() {
    let mut small = Setup::default();
    small.sim.capacity_blocks = 20;
    let cluster = Cluster::start(Setup::default(), small).await;
    let requests = (0..6).map(|number| cluster.answer(cluster.local(prompt(number, 60), 100)));
    for answer in futures::future::join_all(requests).await {
        assert_eq!((answer.failure, answer.scheduled.expect("Scheduled was sent").cached_tokens), (None, Some(0)));
        assert_eq!(answer.tokens[&0].len(), 100);
    }
    cluster.idle().await;
    assert!(
        cluster.decode.metric(r#"tandem_worker_preemptions_total{worker="decode-0"}"#) > 0.0,
        "the cache has less capacity than the requests need"
    );
    for (series, value) in [
        (r#"tandem_worker_prompt_tokens_total{worker="decode-0"}"#, 360.0),
        (r#"tandem_worker_cached_tokens_total{worker="decode-0",tier="device"}"#, 0.0),
        (r#"tandem_worker_prefix_cache_requests_total{worker="decode-0",result="miss"}"#, 6.0),
    ] {
        assert_eq!(cluster.decode.metric(series), value, "{series}");
    }
}

#[tokio::test]
async fn stop_token_ends_a_sample_and_is_reported_but_not_output() {
    let cluster = Cluster::start(Setup::default(), Setup::default()).await;
    let whole =
        cluster.answer(cluster.local(prompt(1, 50), 12)).await.tokens.remove(&0).expect("the answer has the tokens of sample 0");
    let stop = whole[5];
    let first = whole.iter().position(|token| *token == stop).expect("the token is generated");
    let mut request = cluster.local(prompt(1, 50), 12);
    request.sampling.as_mut().expect("the field is set").stop_token_ids = vec![stop];
    let stopped = cluster.answer(request).await;
    assert_eq!(stopped.tokens.get(&0).map_or(&[][..], Vec::as_slice), &whole[..first]);
    assert_eq!((stopped.finished[&0].reason(), stopped.finished[&0].stop_token), (FinishReason::Stop, Some(stop)));
}

#[tokio::test]
async fn logprobs_of_tokens_and_prompt_are_sent_on_request() {
    let cluster = Cluster::start(Setup::default(), Setup::default()).await;
    cluster.answer(cluster.local(prompt(1, 50), 1)).await;
    let mut request = cluster.local(prompt(1, 50), 0);
    request.prompt_logprobs = Some(2);
    let answer = cluster.answer(request).await;
    assert_eq!(answer.cached_tokens(), Some(0), "computed without cache reads");
    let logprobs = answer.prompt_logprobs.expect("logprobs were requested").tokens;
    assert_eq!(logprobs.iter().map(|token| token.token).collect::<Vec<_>>(), prompt(1, 50));
    assert!(logprobs[0].logprob.is_none() && logprobs[1..].iter().all(|token| token.logprob.is_some() && token.top.len() == 2));
    assert!(answer.tokens.is_empty());
    assert_eq!(answer.finished[&0].reason(), FinishReason::Length);
}

#[tokio::test]
async fn worker_that_reports_no_cached_tokens_leaves_the_field_unset() {
    let silent = Setup { report_cached_tokens: false, ..Setup::default() };
    let cluster = Cluster::start(silent.clone(), silent).await;
    for request in [cluster.local(prompt(1, 100), 4), cluster.remote(prompt(2, 100), 4)] {
        for _ in 0..2 {
            let scheduled =
                cluster.answer(request.clone()).await.scheduled.expect("Scheduled is sent even without cached tokens");
            assert_eq!((scheduled.cached_tokens, scheduled.cached_tokens_by_tier.len()), (None, 0));
        }
    }
    let series = r#"tandem_worker_cached_tokens_total{worker="prefill-0",tier="device"}"#;
    assert_eq!(cluster.prefill.metric(series), 96.0, "the worker's metric counts cached tokens");
}

#[tokio::test]
async fn worker_without_prefix_caching_reports_zero_cached_tokens() {
    let mut setup = Setup::default();
    setup.engine.prefix_caching = false;
    let cluster = Cluster::start(setup.clone(), setup).await;
    for request in [cluster.local(prompt(1, 100), 4), cluster.remote(prompt(2, 100), 4)] {
        for _ in 0..2 {
            assert_eq!(cluster.answer(request.clone()).await.cached_tokens(), Some(0));
        }
    }
}

#[tokio::test]
async fn slow_client_does_not_delay_other_clients() {
    let cluster = Cluster::start(Setup::default(), Setup::default()).await;
    let mut unread = cluster.local(prompt(1, 100), 20_000);
    unread.samples = 2;
    let unread = cluster.open(unread).await;
    for number in 2..6 {
        assert_eq!(cluster.answer(cluster.local(prompt(number, 100), 10)).await.tokens[&0].len(), 10);
    }
    drop(unread);
    cluster.idle().await;
}

#[tokio::test]
async fn many_slow_clients_do_not_delay_other_clients_on_the_same_connection() {
    let cluster = Cluster::start(Setup::default(), Setup::default()).await;
    let mut unread = Vec::new();
    for number in 0..15 {
        unread.push(cluster.open(cluster.local(prompt(number, 50), 4_000)).await);
    }
    let mut read = cluster.open(cluster.local(prompt(15, 50), 4_200)).await;
    read.scheduled().await;
    read.started().await;
    assert_eq!(read.tokens().await.len(), 4_200);
    drop(unread);
    cluster.idle().await;
}

#[tokio::test]
async fn requests_that_can_never_run_are_refused_as_invalid() {
    let cluster = Cluster::start(Setup::default(), Setup::default()).await;
    let decode = cluster.decode.info.instance_id.clone();
    let mut requests = vec![cluster.local(prompt(1, 50), u32::MAX), cluster.local(vec![], 1), cluster.local(vec![u32::MAX], 1)];
    requests.extend([cluster.remote(vec![u32::MAX], 1), cluster.local(prompt(1, 70_000), 1)]);
    // The decode worker refuses the following remote requests, because it can never run them. So no prefill worker computes their prompts.
    let mut samples = cluster.remote(prompt(1, 50), 1_000);
    samples.samples = 128;
    requests.extend([cluster.remote(prompt(1, 50), u32::MAX), cluster.remote(prompt(1, 70_000), 1), samples]);
    let mut nan = cluster.local(prompt(1, 50), 1);
    nan.sampling.as_mut().expect("the field is set").temperature = f32::NAN;
    requests.push(nan);
    for request in requests {
        assert_eq!(cluster.failure(request).await, (FailureReason::InvalidRequest, decode.clone()));
    }
    cluster.idle().await;
    assert_eq!(cluster.prefill.metric(r#"tandem_worker_prompt_tokens_total{worker="prefill-0"}"#), 0.0);
}

#[tokio::test]
async fn workers_report_their_description_and_cache_contents() {
    let cluster = Cluster::start(Setup::default(), Setup::default()).await;
    let info = &cluster.decode.info;
    assert_eq!((info.role(), info.worker_id.as_str(), info.block_size, info.block_bytes), (Role::Decode, "decode-0", 16, 128));
    assert_eq!((cluster.prefill.info.role(), cluster.prefill.info.model.as_str()), (Role::Prefill, "sim"));

    cluster.answer(cluster.local(prompt(1, 40), 1)).await;
    let control = ControlClient::new(crate::harness::channel(&cluster.decode.address).await);
    let watch = |instance_id: &str| {
        let request = WatchRequest { instance_id: instance_id.to_owned(), events_over_nats: false };
        let mut control = control.clone();
        async move { control.watch(request).await }
    };
    assert_eq!(watch("another").await.expect_err("the watch of another instance is refused").code(), Code::FailedPrecondition);
    let mut replies = watch(&info.instance_id).await.expect("the watch of this instance is accepted").into_inner();
    let mut assembly = SnapshotAssembly::new(info.capacity_blocks as usize);
    let mut next = async || {
        let reply =
            tokio::time::timeout(TIMEOUT, replies.message()).await.expect("a message arrives").expect("the stream has no error");
        reply.expect("the stream is open").message.expect("messages are not empty")
    };
    let snapshot = loop {
        let watch_reply::Message::Snapshot(chunk) = next().await else { panic!("the first messages must be the snapshot") };
        if let Some(snapshot) = assembly.push(chunk).expect("the assembly accepts the chunk") {
            break snapshot;
        }
    };
    let hashes = |number| sequence_hashes(&HashKey::NONE, &Namespace::from_bytes(b"sim"), 16, &prompt(number, 40));
    let held: Vec<_> = snapshot.stored.iter().flat_map(|chain| chain.sequence_hashes.clone()).collect();
    assert_eq!(held, hashes(1));

    cluster.answer(cluster.local(prompt(2, 40), 1)).await;
    let (mut stored, mut included_request_ids, mut last) = (Vec::new(), Vec::new(), snapshot.at_event_id);
    while stored.len() < 2 || included_request_ids.is_empty() {
        let watch_reply::Message::Batch(batch) = next().await else { panic!("expected a batch") };
        let batch = KvBatch::try_from(batch).expect("the batch is valid");
        for event in &batch.events {
            assert_eq!(event.event_id, last + 1, "event ids have no gaps");
            last = event.event_id;
            let tandem_kv::Change::Stored(chain) = &event.change else { panic!("expected a stored chain") };
            stored.extend(chain.sequence_hashes.clone());
        }
        included_request_ids.extend(batch.included_request_ids);
    }
    assert_eq!(stored, hashes(2));
    assert_eq!(included_request_ids, ["request"]);
}
