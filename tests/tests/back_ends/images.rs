//! Tests of images through a frontend, a router and decode workers with fake vLLM servers, which are also the renderers.

use super::*;
use serde_json::{Value, json};
use tandem_frontend::{FrontendSettings, Renderer};
use tandem_process::discovery::MemberSource;
use tandem_router::RouterSettings;
use tandem_tests::{
    Answer, Client, Endpoint,
    fake_vllm::images::{PLACEHOLDER, png, url},
    prose,
    services::{Services, worker_settings},
    wait_until,
};
use tandem_text::ServedModel;

const BLOCK_SIZE: u64 = 32;
const CHAT: &str = "/v1/chat/completions";

struct Cluster {
    _services: Services,
    client: Client,
    engines: Vec<External>,
}

fn reading_images() -> FakeSettings {
    FakeSettings { images: true, ..FakeSettings::default() }
}

fn renderer(url: String) -> Renderer {
    Renderer { models: Vec::new(), url, key: None, ca: None }
}

/// The address of a server that refuses connections.
fn nothing() -> Renderer {
    renderer("http://127.0.0.1:9".to_owned())
}

impl Cluster {
    async fn start(fakes: Vec<FakeSettings>) -> Result<Self> {
        Self::with_renderers(fakes, |engines| engines.iter().map(|engine| renderer(engine.fake.url())).collect()).await
    }

    async fn with_renderers(fakes: Vec<FakeSettings>, renderers: impl FnOnce(&[External]) -> Vec<Renderer>) -> Result<Self> {
        Self::with(fakes, |settings, engines| settings.renderers = renderers(engines)).await
    }

    async fn with(fakes: Vec<FakeSettings>, change: impl FnOnce(&mut FrontendSettings, &[External])) -> Result<Self> {
        let (services, mut engines, mut workers) = (Services::default(), Vec::new(), Vec::new());
        let reads_images = fakes.iter().any(|fake| fake.images);
        for (number, fake) in fakes.into_iter().enumerate() {
            let engine = external(fake, |settings| settings.hash_key = HashKey::NONE).await?;
            let worker = worker_settings(&format!("decode-{number}"), "fake");
            workers.push(services.decode_worker(worker, engine.adapter.clone()).await?.to_string());
            engines.push(engine);
        }
        let workers = MemberSource::List(workers);
        let router = services.router(RouterSettings { workers, ..RouterSettings::default() }).await?;
        let model = ServedModel::sim("fake").with_context_length(4_096);
        let mut settings = FrontendSettings::new(router.to_string(), model);
        change(&mut settings, &engines);
        let client = Client::new(services.frontend(settings).await?);
        services.ready(engines.len(), &client).await?;
        let cluster = Self { _services: services, client, engines };
        if reads_images {
            let schema = async || Ok(cluster.client.get("/openapi.json").await?.1.contains("data:image/"));
            wait_until("the frontend knows that a worker accepts images", schema).await?;
        }
        Ok(cluster)
    }

    fn counted(&self) -> (u64, u64) {
        let counts = self.engines.iter().map(|engine| engine.fake.counted());
        counts.fold((0, 0), |(prompts, cached), (more, hits)| (prompts + more, cached + hits))
    }

    /// Sends a request. Checks that the usage has the counts of the engine.
    async fn answer(&self, request: &Value) -> Result<Answer> {
        let before = self.counted();
        let answer = self.client.answer(CHAT, request).await?;
        anyhow::ensure!(answer.status == 200, "{answer:?}");
        let after = self.counted();
        let reported = (answer.usage("/prompt_tokens"), answer.cached_tokens());
        assert_eq!(reported, (after.0 - before.0, after.1 - before.1));
        Ok(answer)
    }

    /// Waits until the router expects this many cached tokens of the request.
    async fn expects(&self, request: &Value, tokens: u64) -> Result<()> {
        let expected = async || {
            let explained = self.client.explain(CHAT, request).await?;
            let prompt = &explained["prompts"][0];
            // A worker whose report still has the request before would lose against one that computes the prompt, which takes no time here.
            let is_idle = |worker: &Value| worker["sequences"] == 0 && worker["queued_tokens"] == 0;
            let workers = prompt["workers"].as_array().context("the explanation has workers")?;
            Ok(prompt["prefix"]["chosen_tokens"] == tokens && workers.iter().all(is_idle))
        };
        wait_until("the router knows what the engine has cached", expected).await
    }

    /// Returns the status, the code and the message of the answer to a request that is refused.
    async fn refusal(&self, request: &Value) -> Result<(u16, String, String)> {
        let answer = self.client.answer(CHAT, request).await?;
        let error = &answer.last()["error"];
        let text = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
        Ok((answer.status, text("code"), text("message")))
    }
}

fn text(text: &str) -> Value {
    json!({ "type": "text", "text": text })
}

fn image(url: &str) -> Value {
    json!({ "type": "image_url", "image_url": { "url": url } })
}

/// A picture with 100 tokens, which is unlike those of other numbers.
fn picture(number: u8) -> Value {
    image(&url("image/png", &png(280, 280, &[number; 40])))
}

fn user(parts: &[Value]) -> Value {
    json!({ "role": "user", "content": parts })
}

fn chat(messages: &[Value], options: Value) -> Value {
    let mut request = json!({ "model": "fake", "messages": messages, "max_tokens": 4, "temperature": 0 });
    let Value::Object(options) = options else { return request };
    request.as_object_mut().expect("a request is an object").extend(options);
    request
}

#[tokio::test]
async fn second_turn_finds_the_blocks_of_the_picture_on_the_engine_that_has_them() -> Result<()> {
    let cluster = Cluster::start(vec![reading_images(), reading_images()]).await?;
    for number in 0..8 {
        let question = prose(&format!("question {number}"), 5 + 3 * usize::from(number));
        let mut messages = vec![user(&[text(&question), picture(number), text("What is it?")])];
        let before: Vec<_> = cluster.engines.iter().map(|engine| engine.fake.counted().0).collect();
        let first = cluster.answer(&chat(&messages, json!({}))).await?;
        let engine = cluster.engines.iter().zip(before).position(|(engine, before)| engine.fake.counted().0 > before);
        let engine = &cluster.engines[engine.context("an engine has computed the prompt")?].fake;
        assert_eq!(first.cached_tokens(), 0);
        let prompt_tokens = first.usage("/prompt_tokens");
        assert_eq!(prompt_tokens, question.len() as u64 + 100 + "user: What is it?\nassistant: ".len() as u64);
        messages.extend([json!({ "role": "assistant", "content": "A cat." }), user(&[text("Why?")])]);
        let second = chat(&messages, json!({}));
        // The generated tokens are others than the client's text, so the first prompt is what both have in common.
        let cached = prompt_tokens / BLOCK_SIZE * BLOCK_SIZE;
        cluster.expects(&second, cached).await?;
        let prompts = engine.counted().0;
        assert_eq!(cluster.answer(&second).await?.cached_tokens(), cached, "what the router has expected");
        assert!(engine.counted().0 > prompts, "the second turn is computed where the picture is cached");
    }
    assert_eq!(cluster.client.metric("tandem_router_overlap_over_tokens_total", "").await?, 0.0);
    assert_eq!(cluster.client.metric("tandem_router_overlap_under_tokens_total", "").await?, 0.0);
    // The engine gets one placeholder for each image, and the renderer's and the engine's identity are the same.
    for body in cluster.engines.iter().flat_map(|engine| engine.fake.seen()) {
        let ids = body["token_ids"].as_array().context("a request has tokens")?;
        assert_eq!(ids.iter().filter(|id| **id == PLACEHOLDER).count(), 1);
        assert_eq!(body["content_parts"].as_array().map(Vec::len), Some(1));
        let uuid = &body["content_parts"][0]["uuid"];
        let renders: Vec<_> = cluster.engines.iter().flat_map(|engine| engine.fake.renders()).collect();
        assert!(renders.iter().any(|render| render.to_string().contains(&format!("\"uuid\":{uuid}"))), "{uuid}");
        assert!(renders.iter().all(|render| render["cache_salt"].is_null() && render["max_tokens"].is_null()));
    }
    Ok(())
}

#[tokio::test]
async fn pictures_share_blocks_only_if_they_are_equal_and_in_one_namespace() -> Result<()> {
    // With blocks of the cluster's size, a prediction is exact also where prompts begin to differ.
    let cluster = Cluster::start(vec![FakeSettings { block_size: 16, ..reading_images() }]).await?;
    let before = prose("before", 20);
    let request =
        |number, salt: &str| chat(&[user(&[text(&before), picture(number), text("What is it?")])], json!({ "cache_salt": salt }));
    let first = cluster.answer(&request(1, "a")).await?;
    let all = (first.usage("/prompt_tokens") - 1) / 16 * 16;
    // The text before the picture is the same, so its whole blocks are shared, and no others.
    let of_text = ("user: ".len() + before.len()) as u64 / 16 * 16;
    assert!(of_text > 0 && of_text + 64 < all);
    for (number, salt, cached) in [(1, "a", all), (2, "a", of_text), (1, "b", 0), (2, "b", of_text), (1, "b", all), (2, "a", all)]
    {
        let request = request(number, salt);
        cluster.expects(&request, cached).await?;
        assert_eq!(cluster.answer(&request).await?.cached_tokens(), cached, "picture {number} with salt {salt}");
    }
    let uuids: std::collections::BTreeSet<_> =
        cluster.engines[0].fake.seen().iter().map(|body| body["content_parts"][0]["uuid"].to_string()).collect();
    assert_eq!(uuids.len(), 4, "each namespace has its own identity of each picture");
    Ok(())
}

#[tokio::test]
async fn answer_to_a_picture_is_continued_on_another_worker() -> Result<()> {
    let slow = || FakeSettings { step: Duration::from_millis(10), ..reading_images() };
    let cluster = Cluster::start(vec![slow(), slow()]).await?;
    let request = |options| chat(&[user(&[text("What is it?"), picture(1), picture(2)])], options);
    let whole = cluster.answer(&request(json!({ "max_tokens": 60 }))).await?.text(0);
    let other = chat(&[user(&[text("What is it?"), picture(1), picture(3)])], json!({ "max_tokens": 60 }));
    assert_ne!(cluster.answer(&other).await?.text(0), whole, "the answer depends on the pictures");
    let streamed = request(json!({ "max_tokens": 60, "stream": true }));
    let mut response = cluster.client.send(CHAT, &streamed).await?;
    let mut body = response.chunk().await?.context("the answer did not begin")?.to_vec();
    let running = cluster.engines.iter().find(|engine| engine.fake.running() > 0);
    running.context("the answer has ended early")?.fake.crash();
    while let Some(chunk) = response.chunk().await? {
        body.extend_from_slice(&chunk);
    }
    let body = String::from_utf8(body)?;
    let frames = body.split("\n\n").filter_map(|frame| serde_json::from_str::<Value>(frame.strip_prefix("data: ")?).ok());
    let content = |frame: Value| Some(frame["choices"][0]["delta"]["content"].as_str()?.to_owned());
    assert_eq!(frames.filter_map(content).collect::<String>(), whole);
    assert_eq!(cluster.client.metric("tandem_frontend_migrations_total", "").await?, 1.0);
    Ok(())
}

#[tokio::test]
async fn pictures_are_placed_only_on_workers_that_accept_them() -> Result<()> {
    let fakes = vec![FakeSettings::default(), reading_images(), FakeSettings::default()];
    let cluster = Cluster::with_renderers(fakes, |engines| vec![renderer(engines[1].fake.url())]).await?;
    for number in 0..6 {
        cluster.answer(&chat(&[user(&[text(&prose(&number.to_string(), 50)), picture(number)])], json!({}))).await?;
    }
    assert_eq!(cluster.engines.iter().map(|engine| engine.fake.seen().len()).collect::<Vec<_>>(), [0, 6, 0]);
    Ok(())
}

#[tokio::test]
async fn tokens_of_pictures_are_counted_by_every_endpoint() -> Result<()> {
    let cluster = Cluster::start(vec![reading_images()]).await?;
    let file = png(56, 56, b"content");
    let url = url("image/png", &file);
    let messages = [user(&[text("What is it?"), image(&url)])];
    let tokens = cluster.answer(&chat(&messages, json!({}))).await?.usage("/prompt_tokens");
    assert_eq!(tokens, "user: What is it?\nassistant: ".len() as u64 + 4);
    let source =
        json!({ "type": "base64", "media_type": "image/png", "data": url.split_once(',').context("a URL with data")?.1 });
    let blocks = user(&[text("What is it?"), json!({ "type": "image", "source": source })]);
    let items =
        user(&[json!({ "type": "input_text", "text": "What is it?" }), json!({ "type": "input_image", "image_url": url })]);
    for (path, body, pointer) in [
        ("/tokenize", json!({ "model": "fake", "messages": messages }), "/count"),
        ("/v1/messages/count_tokens", json!({ "model": "fake", "messages": [blocks] }), "/input_tokens"),
        ("/v1/messages", json!({ "model": "fake", "max_tokens": 4, "messages": [blocks] }), "/usage/input_tokens"),
        ("/v1/responses/input_tokens", json!({ "model": "fake", "input": [items] }), "/input_tokens"),
        ("/v1/responses", json!({ "model": "fake", "input": [items], "max_output_tokens": 4 }), "/usage/input_tokens"),
    ] {
        let answer: Value = cluster.client.send(path, &body).await?.json().await?;
        let cached = answer.pointer("/usage/cache_read_input_tokens").and_then(Value::as_u64).unwrap_or(0);
        assert_eq!(answer.pointer(pointer).and_then(Value::as_u64).map(|found| found + cached), Some(tokens), "{path}: {answer}");
    }
    Ok(())
}

#[tokio::test]
async fn hostile_images_are_refused_and_nothing_reaches_renderer_or_engine() -> Result<()> {
    let cluster = Cluster::start(vec![reading_images()]).await?;
    let fake = &cluster.engines[0].fake;
    let before = fake.renders().len();
    let file = png(56, 56, b"content");
    let of_type = |media_type| image(&url(media_type, &file));
    let mut named = picture(1);
    named["uuid"] = "mine".into();
    for (parts, expected) in [
        (vec![image("http://127.0.0.1:9/a.png")], "this server fetches no images"),
        (vec![image("https://example.com/a.png")], "this server fetches no images"),
        (vec![of_type("image/jpeg")], "another type"),
        (vec![of_type("image/svg+xml")], "must be of type image/png"),
        (vec![image(&url("image/png", &file[..20]))], "truncated or malformed header"),
        (vec![image(&url("image/png", b"<svg/>"))], "is not a PNG"),
        (vec![image(&url("image/png", &png(100_000, 100_000, b"")))], "more than 33,554,432 pixels"),
        (vec![image(&url("image/png", &png(0, 1, b"")))], "a width or a height of 0"),
        (vec![picture(1); 17], "at most 16 images"),
        (vec![named], "uuid"),
        (vec![picture(1), text("<|im_end|>")], "control token"),
        (vec![picture(1), json!({ "type": "input_audio", "input_audio": {} })], "'input_audio'"),
        (vec![picture(1), json!({ "type": "video_url", "video_url": {} })], "'video_url'"),
    ] {
        let (status, _, message) = cluster.refusal(&chat(&[user(&parts)], json!({}))).await?;
        assert!(status == 400 && message.contains(expected), "{status} {message}");
    }
    for name in ["features", "content_parts"] {
        let body = json!({ "model": "fake", "token_ids": [1], "sampling_params": {}, name: [{ "type": "image_url" }] });
        let answer = cluster.client.send("/inference/v1/generate", &body).await?;
        let status = answer.status().as_u16();
        let message = answer.text().await?;
        assert!(status == 400 && message.contains(name), "{status} {message}");
    }
    for (name, value) in [("mm_processor_kwargs", json!({ "max_pixels": 1 })), ("media_io_kwargs", json!({ "image": {} }))] {
        let (status, _, message) = cluster.refusal(&chat(&[user(&[picture(1)])], json!({ name: value }))).await?;
        assert!(status == 400 && message.contains(name), "{status} {message}");
    }
    assert_eq!((fake.renders().len(), fake.seen().len()), (before, 0));
    Ok(())
}

#[tokio::test]
async fn model_or_frontend_without_images_says_what_is_missing() -> Result<()> {
    let request = chat(&[user(&[picture(1)])], json!({}));
    let (status, _, message) = Cluster::start(vec![FakeSettings::default()]).await?.refusal(&request).await?;
    assert!(status == 400 && message.contains("'image_url', but the model reads only text"), "{status} {message}");
    let without = Cluster::with_renderers(vec![reading_images()], |_| Vec::new()).await?;
    let (status, _, message) = without.refusal(&request).await?;
    assert!(status == 400 && message.contains("--renderer"), "{status} {message}");
    let of_other = |_: &[External]| vec![Renderer { models: vec!["other".to_owned()], ..nothing() }];
    let (status, _, message) = Cluster::with_renderers(vec![reading_images()], of_other).await?.refusal(&request).await?;
    assert!(status == 400 && message.contains("--renderer"), "{status} {message}");
    Ok(())
}

#[tokio::test]
async fn another_renderer_is_asked_if_one_fails() -> Result<()> {
    let renderers = |engines: &[External]| vec![nothing(), renderer(engines[0].fake.url())];
    let cluster = Cluster::with_renderers(vec![reading_images()], renderers).await?;
    for number in 0..4 {
        cluster.answer(&chat(&[user(&[picture(number)])], json!({}))).await?;
    }
    let none = Cluster::with_renderers(vec![reading_images()], |_| vec![nothing(), nothing()]).await?;
    let (status, code, _) = none.refusal(&chat(&[user(&[picture(1)])], json!({}))).await?;
    assert_eq!((status, &*code), (503, "no_renderer"));
    // Texts need no renderer.
    none.answer(&Endpoint::Chat.request("fake", "text", json!({ "max_tokens": 4 }))).await?;
    Ok(())
}

#[tokio::test]
async fn hostile_answers_of_a_renderer_never_reach_an_engine() -> Result<()> {
    let cluster = Cluster::start(vec![reading_images()]).await?;
    let (fake, request) = (&cluster.engines[0].fake, chat(&[user(&[picture(1)])], json!({})));
    let features =
        |hash: &str, place: Value| json!({ "mm_hashes": { "image": [hash] }, "mm_placeholders": { "image": [place] } });
    let place = json!({ "offset": 6, "length": 100 });
    for changes in [
        json!({ "padding": 3 << 20 }),
        json!({ "status": 500 }),
        json!({ "status": 404 }),
        json!({ "features": null }),
        json!({ "features": features(&"a".repeat(64), place) }),
        json!({ "token_ids": [1, 2, 3] }),
        json!({ "token_ids": "text" }),
    ] {
        fake.change_renders(Some(changes.clone()));
        let (status, code, message) = cluster.refusal(&request).await?;
        assert_eq!((status, &*code), (503, "no_renderer"), "{changes}: {message}");
    }
    fake.change_renders(Some(json!({ "status": 400, "error": { "message": "The picture is too small." } })));
    let (status, code, message) = cluster.refusal(&request).await?;
    assert_eq!((status, &*code), (400, "image_refused"));
    assert!(message.contains("The picture is too small."), "{message}");
    fake.change_renders(Some(json!({ "status": 400, "error": { "message": "x".repeat(100_000) } })));
    assert!(cluster.refusal(&request).await?.2.len() < 2_000, "the message is shortened");
    assert!(fake.seen().is_empty());
    fake.change_renders(None);
    cluster.answer(&request).await?;
    Ok(())
}

#[tokio::test]
async fn pictures_count_in_the_budget_for_bodies_until_their_answer_ends() -> Result<()> {
    let change = |settings: &mut FrontendSettings, engines: &[External]| {
        settings.renderers = vec![renderer(engines[0].fake.url())];
        // One client may use half of it.
        settings.bodies_max_bytes = 256 << 10;
    };
    let slow = FakeSettings { step: Duration::from_millis(10), ..reading_images() };
    let cluster = Cluster::with(vec![slow], change).await?;
    // A body of 75 KiB, of which the first 16 KiB are not counted: one client can send two of them at a time.
    let large = |number: u8| image(&url("image/png", &png(56, 56, &vec![number; 56 << 10])));
    let request = |number, stream| chat(&[user(&[large(number)])], json!({ "max_tokens": 1_000, "stream": stream }));
    let mut running = Vec::new();
    for number in 0..2 {
        let mut response = cluster.client.send(CHAT, &request(number, true)).await?;
        response.chunk().await?.context("the answer did not begin")?;
        running.push(response);
    }
    let (status, code, _) = cluster.refusal(&request(3, false)).await?;
    assert_eq!((status, &*code), (503, "body_budget"));
    drop(running);
    let short = chat(&[user(&[large(3)])], json!({}));
    wait_until("the budget is free again", async || Ok(cluster.client.answer(CHAT, &short).await?.status == 200)).await
}

#[tokio::test]
async fn worker_knows_whether_its_server_reads_images() -> Result<()> {
    let text_only = external(FakeSettings::default(), |_| {}).await?;
    let reads = external(reading_images(), |_| {}).await?;
    assert_eq!((text_only.adapter.accepts_images(), reads.adapter.accepts_images()), (false, true));
    Ok(())
}
