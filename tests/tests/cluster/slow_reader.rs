//! Tests of backpressure on a client that stops reading.

use anyhow::{Result, ensure};
use serde_json::json;
use std::{net::SocketAddr, time::Duration};
use tandem::settings::PrefillPlace;
use tandem_tests::{Client, Endpoint, sim_settings_with, start};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
};

/// Sends a request without reading the answer. The socket's receive buffer has a fixed size, because the system would otherwise enlarge it.
async fn send(frontend: SocketAddr, request: &serde_json::Value) -> Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(1 << 16)?;
    let mut connection = socket.connect(frontend).await?;
    let (path, body) = (Endpoint::Chat.path(), request.to_string());
    // An answer over HTTP/1.0 has no chunked encoding: it ends when the connection is closed.
    let head = format!("POST {path} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len());
    connection.write_all((head + &body).as_bytes()).await?;
    Ok(connection)
}

/// The number of tokens that are generated but not yet read is bounded, other requests are served meanwhile, and no text is lost.
#[tokio::test(flavor = "multi_thread")]
async fn client_that_stops_reading_pauses_only_its_own_generation() -> Result<()> {
    const TOKENS: u64 = 15_000;
    // Maximum number of tokens that are generated but not yet read. The sockets buffer some megabytes, and the answer has more than one KiB
    // per token.
    const AHEAD_MAX: f64 = 10_000.0;
    let mut settings = sim_settings_with(PrefillPlace::Local);
    // With a finite speed-up, each step would sleep for at least a millisecond.
    settings.worker.sim.sim_speedup = f64::INFINITY;
    let cluster = start(settings).await?;
    let client = Client::new(cluster.frontend());
    let options = json!({
        "max_tokens": TOKENS, "temperature": 0, "ignore_eos": true, "stream": true,
        "logprobs": true, "top_logprobs": 20,
        "stream_options": { "include_usage": true, "continuous_usage_stats": true },
    });
    let request = Endpoint::Chat.request(&cluster.model_id(), "a long story", options);
    let expected = client.answer(Endpoint::Chat.path(), &request).await?;
    ensure!(expected.done && expected.usage("/completion_tokens") == TOKENS, "{expected:?}");

    let computed = async || client.metric("tandem_worker_batch_tokens_sum", "decode").await;
    let before = computed().await?;
    let mut unread = send(cluster.frontend(), &request).await?;
    // No event reports that a sequence is no longer scheduled. So the test polls until no token has been computed for 500 ms.
    let stopped_generating = async {
        let mut last = before;
        loop {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let now = computed().await?;
            if now == last && now > before {
                return anyhow::Ok(now - before);
            }
            last = now;
        }
    };
    let ahead = tokio::time::timeout(Duration::from_secs(30), stopped_generating).await??;
    ensure!(ahead < AHEAD_MAX, "{ahead} tokens were generated ahead of the client");
    let short = Endpoint::Chat.request(&cluster.model_id(), "meanwhile", json!({ "max_tokens": 20 }));
    let others = tokio::time::timeout(Duration::from_secs(30), client.answer(Endpoint::Chat.path(), &short)).await??;
    ensure!(others.status == 200, "{others:?}");

    let mut text = String::new();
    tokio::time::timeout(Duration::from_secs(60), unread.read_to_string(&mut text)).await??;
    ensure!(text.ends_with("data: [DONE]\n\n"), "{}", &text[text.len().saturating_sub(1_000)..]);
    let mut received = String::new();
    let (_, frames) = text.split_once("\r\n\r\n").unwrap_or_default();
    for frame in frames.split_terminator("\n\n").filter_map(|frame| frame.strip_prefix("data: {")) {
        let frame: serde_json::Value = serde_json::from_str(&format!("{{{frame}"))?;
        received.push_str(frame["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
    }
    ensure!(received == expected.text(0), "the text differs");

    let unread = send(cluster.frontend(), &request).await?;
    let decode_workers = cluster.inner().workers.iter().filter(|worker| worker.id.starts_with("decode"));
    for worker in decode_workers {
        worker.engine.as_ref().expect("an engine in this process").wait_for_load(|load| load.in_use_blocks > 100).await;
    }
    drop(unread);
    cluster.assert_idle().await?;
    cluster.stop().await;
    Ok(())
}
