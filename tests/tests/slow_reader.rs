//! A client that stops reading.

use anyhow::{Result, ensure};
use serde_json::json;
use std::{net::SocketAddr, time::Duration};
use tandem::settings::PrefillPlace;
use tandem_tests::{Client, Endpoint, sim_settings_with, start};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
};

/// Asks for what nobody reads yet. A receive buffer of its own size: the system would let it grow with what comes.
async fn ask(frontend: SocketAddr, request: &serde_json::Value) -> Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(1 << 16)?;
    let mut connection = socket.connect(frontend).await?;
    let (path, body) = (Endpoint::Chat.path(), request.to_string());
    // HTTP/1.0: the answer comes without chunks, and ends with the connection.
    let head = format!("POST {path} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len());
    connection.write_all((head + &body).as_bytes()).await?;
    Ok(connection)
}

/// What is generated ahead of the client is bounded (sockets take most of it), others are served meanwhile, and nothing is lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_stops_reading_stops_its_own_generation_and_nobody_elses() -> Result<()> {
    const TOKENS: u64 = 15_000;
    // The frontend's socket holds some megabytes; a token is more than one KiB here.
    const AHEAD_MAX: f64 = 10_000.0;
    let mut settings = sim_settings_with(PrefillPlace::Local);
    // Steps that sleep take a millisecond each.
    settings.worker.sim.sim_speedup = f64::INFINITY;
    let cluster = start(settings).await?;
    let client = Client::new(cluster.frontend());
    let options = json!({
        "max_tokens": TOKENS, "temperature": 0, "ignore_eos": true, "stream": true,
        "logprobs": true, "top_logprobs": 20,
        "stream_options": { "include_usage": true, "continuous_usage_stats": true },
    });
    let request = Endpoint::Chat.request(&cluster.model_id(), "a long story", options);
    let expected = client.ask(Endpoint::Chat.path(), &request).await?;
    ensure!(expected.done && expected.usage("/completion_tokens") == TOKENS, "{expected:?}");

    let computed = async || client.metric("tandem_worker_batch_tokens_sum", "decode").await;
    let before = computed().await?;
    let mut unread = ask(cluster.frontend(), &request).await?;
    let stops = async {
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
    let ahead = tokio::time::timeout(Duration::from_secs(30), stops).await??;
    ensure!(ahead < AHEAD_MAX, "{ahead} tokens were generated for nobody");
    let short = Endpoint::Chat.request(&cluster.model_id(), "meanwhile", json!({ "max_tokens": 20 }));
    let others = tokio::time::timeout(Duration::from_secs(30), client.ask(Endpoint::Chat.path(), &short)).await??;
    ensure!(others.status == 200, "{others:?}");

    let mut text = String::new();
    tokio::time::timeout(Duration::from_secs(60), unread.read_to_string(&mut text)).await??;
    ensure!(text.ends_with("data: [DONE]\n\n"), "{}", &text[text.len().saturating_sub(1_000)..]);
    let mut said = String::new();
    let (_, frames) = text.split_once("\r\n\r\n").unwrap_or_default();
    for frame in frames.split_terminator("\n\n").filter_map(|frame| frame.strip_prefix("data: {")) {
        let frame: serde_json::Value = serde_json::from_str(&format!("{{{frame}"))?;
        said.push_str(frame["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
    }
    ensure!(said == expected.text(0), "the text is another");

    let unread = ask(cluster.frontend(), &request).await?;
    let stopped = cluster.inner().workers().iter().filter(|worker| worker.id.starts_with("decode"));
    for worker in stopped {
        worker.engine.wait_for_load(|load| load.in_use_blocks > 100).await;
    }
    drop(unread);
    cluster.assert_idle().await?;
    cluster.stop().await;
    Ok(())
}
