//! Tests of the count of cached tokens that clients of a whole cluster receive.

use anyhow::Result;
use serde_json::json;
use tandem::settings::{EngineKind, PrefillPlace, UpSettings};
use tandem_tests::{
    Answer, Client, Endpoint, prose, sim_settings, sim_settings_with, start, start_without_cached_tokens, with_prefill,
};

const BLOCK_SIZE: u64 = 16;

/// Returns how many tokens of a prompt can be found in a cache: those in full blocks before the last token.
fn reusable(prompt_tokens: u64) -> u64 {
    (prompt_tokens - 1) / BLOCK_SIZE * BLOCK_SIZE
}

/// Sends a new prompt of about 1,500 tokens twice, to both endpoints, streamed and not. All full blocks before the last token must be
/// cached when it is sent the second time. When it is sent the first time, only tokens of the prefix that all chats share may be cached.
async fn check_prompt_sent_twice(settings: UpSettings, shared_by_all_chats: u64) -> Result<()> {
    let place = settings.router.prefill;
    let cluster = start(settings).await?;
    let client = Client::new(cluster.frontend());
    for endpoint in [Endpoint::Chat, Endpoint::Completions] {
        for stream in [false, true] {
            let name = format!("{endpoint:?} stream={stream} prefill={place:?}");
            let mut options = json!({ "max_tokens": 4, "temperature": 0, "stream": stream });
            if stream {
                options["stream_options"] = json!({ "include_usage": true });
            }
            let request = endpoint.request(&cluster.model_id(), &prose(&name, 1_450), options);
            let first = client.answer(endpoint.path(), &request).await?;
            let second = client.answer(endpoint.path(), &request).await?;
            let prompt_tokens = first.usage("/prompt_tokens");
            assert!((1_400..12_000).contains(&prompt_tokens), "{name}: {prompt_tokens}");
            let shared = if endpoint == Endpoint::Chat { shared_by_all_chats } else { 0 };
            assert!(first.cached_tokens() <= shared, "{name}: {} tokens of a new prompt were cached", first.cached_tokens());
            assert_eq!(second.cached_tokens(), reusable(prompt_tokens), "{name}");
            assert_eq!(first.text(0), second.text(0), "{name}: the cache never changes the answer");
            for answer in [&first, &second] {
                assert_eq!(answer.usage("/total_tokens"), prompt_tokens + answer.usage("/completion_tokens"), "{name}");
                assert_eq!(answer.usage("/prompt_tokens_details/audio_tokens"), 0, "{name}");
                assert_eq!(answer.details()["cached_tokens_source"], "worker", "{name}");
                let remote = !answer.details()["prefill_worker"].is_null();
                assert_eq!(remote, place == PrefillPlace::Remote, "{name}: {}", answer.details());
                assert_eq!(answer.details()["cached_tokens_by_tier"]["device"], answer.cached_tokens(), "{name}");
                assert!(answer.done);
            }
            if stream {
                assert_stream_shape(&second);
            }
        }
    }
    cluster.assert_idle().await?;
    cluster.stop().await;
    Ok(())
}

/// Asserts that only the last frame has usage, without choices; all frames before it have `usage: null`.
fn assert_stream_shape(answer: &Answer) {
    let (last, before) = answer.frames.split_last().expect("the answer has frames");
    assert_eq!(last["choices"], json!([]));
    assert!(before.iter().all(|frame| frame.as_object().is_some_and(|frame| frame.get("usage") == Some(&json!(null)))));
    assert!(before.iter().rev().find_map(|frame| frame["choices"][0]["finish_reason"].as_str()).is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn sim_remote_prefill_counts_cached_tokens() -> Result<()> {
    check_prompt_sent_twice(sim_settings_with(PrefillPlace::Remote), 64).await
}

#[tokio::test(flavor = "multi_thread")]
async fn sim_local_prefill_counts_cached_tokens() -> Result<()> {
    check_prompt_sent_twice(sim_settings_with(PrefillPlace::Local), 64).await
}

#[tokio::test(flavor = "multi_thread")]
async fn sim_with_a_real_tokenizer_counts_cached_tokens() -> Result<()> {
    let Some(mut settings) = tandem_tests::cpu_settings() else { return Ok(()) };
    settings.model.engine = EngineKind::Sim;
    check_prompt_sent_twice(with_prefill(PrefillPlace::Remote, settings), 32).await
}

#[tokio::test(flavor = "multi_thread")]
async fn cpu_remote_prefill_counts_cached_tokens() -> Result<()> {
    let Some(settings) = tandem_tests::cpu_settings() else { return Ok(()) };
    check_prompt_sent_twice(with_prefill(PrefillPlace::Remote, settings), 32).await
}

#[tokio::test(flavor = "multi_thread")]
async fn cpu_local_prefill_counts_cached_tokens() -> Result<()> {
    let Some(settings) = tandem_tests::cpu_settings() else { return Ok(()) };
    check_prompt_sent_twice(with_prefill(PrefillPlace::Local, settings), 32).await
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_cached_token_count_is_replaced_by_a_marked_estimate() -> Result<()> {
    for prefill in [PrefillPlace::Remote, PrefillPlace::Local] {
        let settings = UpSettings { prefill_workers: 1, ..sim_settings_with(prefill) };
        let cluster = start_without_cached_tokens(settings).await?;
        let client = Client::new(cluster.frontend());
        let request = Endpoint::Completions.request(&cluster.model_id(), &prose("estimate", 300), json!({ "max_tokens": 2 }));
        for warm in [false, true] {
            let answer = client.answer(Endpoint::Completions.path(), &request).await?;
            let expected = if warm { reusable(answer.usage("/prompt_tokens")) } else { 0 };
            assert_eq!(answer.cached_tokens(), expected, "{prefill:?} warm={warm}");
            assert_eq!(answer.details()["cached_tokens_source"], "router_estimate");
            assert_eq!(answer.details()["overlap_blocks"], expected / BLOCK_SIZE);
            cluster.settle_events().await?;
        }
        let estimated = client.metric("tandem_frontend_cached_tokens_total", "source=\"router_estimate\"").await?;
        assert!(estimated > 0.0);
        assert_eq!(client.metric("tandem_frontend_cached_tokens_total", "source=\"worker\"").await?, 0.0);
        cluster.stop().await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn zero_cached_tokens_reported_without_prefix_caching_reach_the_client() -> Result<()> {
    for prefill in [PrefillPlace::Remote, PrefillPlace::Local] {
        let mut settings = sim_settings_with(prefill);
        settings.worker.no_prefix_caching = true;
        let cluster = start(settings).await?;
        let client = Client::new(cluster.frontend());
        let request = Endpoint::Chat.request(&cluster.model_id(), &prose("off", 300), json!({ "max_tokens": 2 }));
        for _ in 0..2 {
            let answer = client.answer(Endpoint::Chat.path(), &request).await?;
            assert_eq!(answer.cached_tokens(), 0);
            assert_eq!(answer.details()["cached_tokens_source"], "worker");
        }
        cluster.stop().await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn prompt_counts_once_for_all_samples_and_each_prompt_of_a_batch_counts() -> Result<()> {
    let cluster = start(sim_settings()).await?;
    let client = Client::new(cluster.frontend());
    let text = prose("counted", 200);
    let options = json!({ "max_tokens": 3, "n": 3, "ignore_eos": true });
    let request = Endpoint::Completions.request(&cluster.model_id(), &text, options);
    let first = client.answer(Endpoint::Completions.path(), &request).await?;
    assert_eq!(first.usage("/completion_tokens"), 9);
    let prompt_tokens = first.usage("/prompt_tokens");
    let again = client.answer(Endpoint::Completions.path(), &request).await?;
    assert_eq!((again.usage("/prompt_tokens"), again.cached_tokens()), (prompt_tokens, reusable(prompt_tokens)));
    let batch = json!({ "model": cluster.model_id(), "prompt": [text, text], "max_tokens": 1 });
    let batch = client.answer(Endpoint::Completions.path(), &batch).await?;
    assert_eq!(batch.usage("/prompt_tokens"), 2 * prompt_tokens);
    assert_eq!(batch.cached_tokens(), 2 * reusable(prompt_tokens));
    // The histogram counts finished prompts. Two requests have one prompt each, and one request has two.
    assert_eq!(client.metric("tandem_frontend_request_cached_tokens_count", "").await?, 4.0);
    assert_eq!(client.metric("tandem_frontend_prompt_tokens_total", "").await?, 4.0 * prompt_tokens as f64);
    let cached = client.metric("tandem_frontend_cached_tokens_total", "source=\"worker\"").await?;
    assert_eq!(cached, 3.0 * reusable(prompt_tokens) as f64);
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn different_cache_salts_share_no_blocks_and_a_continued_chat_is_cached() -> Result<()> {
    let cluster = start(sim_settings()).await?;
    let client = Client::new(cluster.frontend());
    let complete = async |salt: &str| {
        let mut request = Endpoint::Completions.request(&cluster.model_id(), &prose("salted", 300), json!({ "max_tokens": 2 }));
        request["cache_salt"] = json!(salt);
        client.answer(Endpoint::Completions.path(), &request).await
    };
    assert_eq!(complete("tenant one").await?.cached_tokens(), 0);
    assert_eq!(complete("tenant two").await?.cached_tokens(), 0);
    assert!(complete("tenant one").await?.cached_tokens() > 0);
    let question = prose("chat", 400);
    let mut messages = json!([{ "role": "user", "content": question }]);
    let request =
        |messages: &serde_json::Value| json!({ "model": cluster.model_id(), "messages": messages, "max_tokens": 200, "seed": 1 });
    let first = client.answer(Endpoint::Chat.path(), &request(&messages)).await?;
    let turns = messages.as_array_mut().expect("messages is a list");
    turns.push(json!({ "role": "assistant", "content": first.text(0) }));
    turns.push(json!({ "role": "user", "content": "And then?" }));
    cluster.settle_events().await?;
    let second = client.answer(Endpoint::Chat.path(), &request(&messages)).await?;
    let (held, prompt_before) = (second.cached_tokens(), first.usage("/prompt_tokens"));
    assert!(held >= reusable(prompt_before) - BLOCK_SIZE, "{held} of {prompt_before} tokens of the first turn are found");
    cluster.stop().await;
    Ok(())
}
