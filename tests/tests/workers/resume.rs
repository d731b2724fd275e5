//! Tests of workers that crash or hang while a frontend and a router use them. Every answer must be the same as without the fault.

use crate::harness::{Setup, TIMEOUT, Worker};
use serde_json::{Value, json};
use std::{net::SocketAddr, time::Duration};
use tandem_devices::sim::SimSettings;
use tandem_frontend::FrontendSettings;
use tandem_proto::{
    channel::{PING_INTERVAL, PING_TIMEOUT},
    v1::{WorkersRequest, router_client::RouterClient},
};
use tandem_router::{PrefillPlace, RouterSettings};
use tandem_tests::{Answer, Client, Endpoint, prose, services::Services};
use tandem_text::ServedModel;
use tokio::task::JoinSet;

struct Cluster {
    prefills: Vec<Worker>,
    decodes: Vec<Worker>,
    frontend: SocketAddr,
    router: String,
    services: Services,
}

impl Cluster {
    async fn start(speedup: f64, prefill: PrefillPlace) -> Self {
        Self::start_with(speedup, prefill, Setup::default()).await
    }

    async fn start_with(speedup: f64, prefill: PrefillPlace, setup: Setup) -> Self {
        Self::start_pairs(2, speedup, prefill, setup).await
    }

    /// Starts this number of prefill workers and of decode workers.
    async fn start_pairs(pairs: usize, speedup: f64, prefill: PrefillPlace, setup: Setup) -> Self {
        let (mut prefills, mut decodes) = (Vec::new(), Vec::new());
        for number in 0..pairs {
            let setup = Setup { number, sim: SimSettings { speedup, ..Default::default() }, ..setup.clone() };
            prefills.push(Worker::prefill(&setup).await);
            decodes.push(Worker::decode(&setup).await);
        }
        let (services, addresses) = (Services::default(), prefills.iter().chain(&decodes).map(|worker| worker.address.clone()));
        let settings = RouterSettings { workers: addresses.collect(), prefill, ..Default::default() };
        let router = services.router(settings).await.expect("a port is free").to_string();
        let settings = FrontendSettings::new(router.clone(), ServedModel::sim("sim"));
        let frontend = services.frontend(settings).await.expect("a port is free");
        let cluster = Self { prefills, decodes, frontend, router, services };
        cluster.wait_for_members(2 * pairs).await;
        cluster.services.ready(2 * pairs, &cluster.client()).await.expect("the frontend is ready in time");
        cluster
    }

    async fn wait_for_members(&self, count: usize) {
        let waiting = async {
            loop {
                if let Ok(mut router) = RouterClient::connect(format!("http://{}", self.router)).await {
                    let view = router.workers(WorkersRequest {}).await.expect("the server answers").into_inner();
                    if view.workers.len() == count && view.bookings == 0 {
                        return;
                    }
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(TIMEOUT, waiting).await.expect("the router knows its workers and has released all bookings");
    }

    fn client(&self) -> Client {
        Client::new(self.frontend)
    }

    fn send_all(&self, requests: &[Value]) -> JoinSet<(usize, Answer)> {
        let mut pending = JoinSet::new();
        for (number, request) in requests.iter().cloned().enumerate() {
            let client = self.client();
            pending.spawn(async move {
                let path = Endpoint::Completions.path();
                (number, client.answer(path, &request).await.expect("every request has an answer"))
            });
        }
        pending
    }

    /// Waits for all answers. Returns the texts of each answer's samples and its number of completion tokens, in the order of requests.
    async fn answers(&self, mut pending: JoinSet<(usize, Answer)>) -> Vec<(Vec<String>, u64)> {
        let mut answers = Vec::new();
        while let Some(answer) = tokio::time::timeout(TIMEOUT, pending.join_next()).await.expect("an answer arrives") {
            let (number, answer) = answer.expect("the client does not panic");
            assert!(answer.status == 200 && answer.done, "request {number}: {answer:?}");
            let texts = (0..2).map(|sample| answer.text(sample)).collect();
            answers.push((number, (texts, answer.usage("/completion_tokens"))));
        }
        answers.sort_unstable();
        answers.into_iter().map(|(_, answer)| answer).collect()
    }

    async fn wait_for_metric(&self, name: &str, at_least: f64) {
        let counting = async {
            while self.client().metric(name, "").await.expect("the server answers") < at_least {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(TIMEOUT, counting).await.unwrap_or_else(|_| panic!("{name} does not reach {at_least}"));
    }

    async fn stop(self) {
        self.services.shutdown.run(Duration::ZERO).await;
    }
}

fn requests(count: usize, prompt_tokens: usize, max_tokens: u32) -> Vec<Value> {
    let request = |number: usize| {
        let sampling = match number % 5 {
            4 => json!({ "seed": number, "n": 2, "regex": format!("([a-z ]{{1,9}}[0-9])*[a-z]{{{},}}", max_tokens / 2) }),
            0 => json!({ "temperature": 0 }),
            1 => json!({ "seed": number, "n": 2 }),
            2 => json!({ "seed": number, "frequency_penalty": 0.8, "presence_penalty": 0.3, "logit_bias": { "97": 2 } }),
            _ => json!({ "temperature": 0, "min_tokens": max_tokens / 2, "stop": ["te"] }),
        };
        let mut request = Endpoint::Completions.request("sim", &prose(&number.to_string(), prompt_tokens / 6), sampling);
        request["max_tokens"] = max_tokens.into();
        request["ignore_eos"] = (number % 5 != 3).into();
        request["stream"] = true.into();
        request["stream_options"] = json!({ "include_usage": true });
        request
    };
    (0..count).map(request).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_survive_a_decode_worker_that_crashes_during_streams() {
    for place in [PrefillPlace::Remote, PrefillPlace::Local] {
        let mut cluster = Cluster::start(10.0, place).await;
        let requests = requests(16, 300, 600);
        let expected = cluster.answers(cluster.send_all(&requests)).await;
        assert_eq!(cluster.client().metric("tandem_frontend_migrations_total", "").await.expect("the server answers"), 0.0);
        let pending = cluster.send_all(&requests);
        // The fault occurs after all streams have started.
        cluster.wait_for_metric("tandem_frontend_time_to_first_token_seconds_count", 32.0).await;
        cluster.decodes[0].kill();
        assert!(cluster.answers(pending).await == expected, "{place:?}: an answer differs");
        cluster.wait_for_metric("tandem_frontend_migrations_total", 1.0).await;
        cluster.wait_for_metric("tandem_frontend_request_cached_tokens_count", 32.0).await;
        // Later requests must succeed, and the workers must release all blocks.
        assert!(cluster.answers(cluster.send_all(&requests)).await == expected);
        cluster.wait_for_members(3).await;
        cluster.decodes[1].idle().await;
        cluster.prefills[0].idle().await;
        cluster.prefills[1].idle().await;
        cluster.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_survive_a_prefill_worker_that_crashes_during_prompts() {
    let mut cluster = Cluster::start(2.0, PrefillPlace::Remote).await;
    let requests = requests(12, 3_000, 20);
    let pending = cluster.send_all(&requests);
    cluster.prefills[0].until(|load| load.running_sequences > 0).await;
    cluster.prefills[0].kill();
    let answers = cluster.answers(pending).await;
    cluster.wait_for_metric("tandem_frontend_attempts_failed_total", 1.0).await;
    assert!(cluster.answers(cluster.send_all(&requests)).await == answers, "later requests succeed");
    cluster.wait_for_members(3).await;
    cluster.decodes[0].idle().await;
    cluster.decodes[1].idle().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_fail_over_from_a_hung_decode_worker_within_the_keep_alive_limit() {
    let mut cluster = Cluster::start(1.0, PrefillPlace::Local).await;
    let requests = requests(8, 100, 100);
    let expected = cluster.answers(cluster.send_all(&requests)).await;
    let pending = cluster.send_all(&requests);
    cluster.wait_for_metric("tandem_frontend_time_to_first_token_seconds_count", 16.0).await;
    let hang = cluster.decodes[0].hang();
    let limit = PING_INTERVAL + PING_TIMEOUT + Duration::from_secs(5);
    let answers = tokio::time::timeout(limit, cluster.answers(pending)).await.expect("requests fail over within the limit");
    assert!(answers == expected, "an answer differs");
    cluster.wait_for_metric("tandem_frontend_migrations_total", 1.0).await;
    drop(hang);
    cluster.decodes[0].idle().await;
    cluster.decodes[1].idle().await;
    cluster.stop().await;
}

/// Only the engine hangs: its process still answers pings and calls.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hung_engine_is_avoided_and_used_again_after_recovery() {
    let mut impatient = Setup::default();
    impatient.engine.step_max = Duration::from_secs(3);
    let cluster = Cluster::start_with(10.0, PrefillPlace::Remote, impatient).await;
    let requests = requests(16, 300, 600);
    let expected = cluster.answers(cluster.send_all(&requests)).await;
    for (hung, during_answers) in [(&cluster.decodes[0], true), (&cluster.prefills[0], false)] {
        let pending = cluster.send_all(&requests);
        if during_answers {
            cluster.wait_for_metric("tandem_frontend_time_to_first_token_seconds_count", 32.0).await;
        }
        hung.gate.close();
        let answers = async {
            // The router has removed the worker with the hung engine.
            cluster.wait_for_members(3).await;
            cluster.answers(pending).await
        };
        let answers = tokio::time::timeout(TIMEOUT, answers).await.expect("requests fail over");
        assert!(answers == expected, "{}: an answer differs", hung.info.worker_id);
        assert!(cluster.answers(cluster.send_all(&requests)).await == expected, "requests succeed while the engine hangs");
        hung.gate.open();
        cluster.wait_for_members(4).await;
        hung.idle().await;
        assert!(cluster.answers(cluster.send_all(&requests)).await == expected);
    }
    cluster.wait_for_metric("tandem_frontend_migrations_total", 1.0).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn constrained_answers_stay_valid_when_their_decode_worker_crashes() {
    for place in [PrefillPlace::Remote, PrefillPlace::Local] {
        let mut cluster = Cluster::start(10.0, place).await;
        // A tree of arrays may have any depth, so answers are long. An answer is complete when all of its arrays are closed.
        let tree = json!({ "$ref": "#/$defs/a", "$defs": { "a": { "type": "array", "minItems": 25, "items": {
            "anyOf": [{ "type": "integer", "minimum": 0, "maximum": 999 }, { "enum": ["tea", "oat"] }, { "type": "string", "maxLength": 9 }]
        } } } });
        let requests: Vec<Value> = (0..16)
            .map(|number| {
                let sampling = json!({
                    "seed": number, "n": 2, "max_tokens": 900, "stream": true, "stream_options": { "include_usage": true },
                    "guided_json": tree, "frequency_penalty": 0.3,
                });
                Endpoint::Completions.request("sim", &prose(&number.to_string(), 50), sampling)
            })
            .collect();
        let expected = cluster.answers(cluster.send_all(&requests)).await;
        let pending = cluster.send_all(&requests);
        cluster.wait_for_metric("tandem_frontend_time_to_first_token_seconds_count", 32.0).await;
        cluster.decodes[0].kill();
        let answers = cluster.answers(pending).await;
        assert!(answers == expected, "{place:?}: an answer differs");
        cluster.wait_for_metric("tandem_frontend_migrations_total", 1.0).await;
        let mut complete = 0;
        for text in answers.iter().flat_map(|(texts, _)| texts) {
            // An answer that has reached the limit of tokens is the beginning of such a tree.
            if text.ends_with(']') {
                let list: Vec<Value> = serde_json::from_str(text).expect("a complete answer is JSON");
                assert!(list.len() >= 25 && list.iter().all(|item| item.is_u64() || item.is_string()));
                complete += 1;
            }
        }
        assert!(complete > 1, "only {complete} answers are complete");
        cluster.decodes[1].idle().await;
        cluster.stop().await;
    }
}

/// The request has generated few tokens, or none, when its worker ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_that_ends_two_workers_is_not_sent_to_a_third() {
    for place in [PrefillPlace::Local, PrefillPlace::Remote] {
        let mut cluster = Cluster::start_pairs(3, 1.0, place, Setup::default()).await;
        let (client, mut pending) = (cluster.client(), cluster.send_all(&requests(1, 3_000, 600)));
        let workers = match place {
            PrefillPlace::Remote => &mut cluster.prefills,
            _ => &mut cluster.decodes,
        };
        let mut alive: Vec<&mut Worker> = workers.iter_mut().collect();
        for _ in 0..2 {
            let running = alive.iter().map(|worker| Box::pin(worker.until(|load| load.running_sequences > 0)));
            let (_, victim, _) = futures::future::select_all(running).await;
            alive.remove(victim).kill();
        }
        let answer = tokio::time::timeout(TIMEOUT, pending.join_next()).await.expect("the request ends");
        let (_, answer) = answer.expect("one request was sent").expect("the client does not panic");
        let error = &answer.frames.last().expect("the answer has an error")["error"];
        assert_eq!(error["code"], "request_ends_workers", "{place:?}: {answer:?}");
        let counted = client.metric("tandem_frontend_requests_ended_workers_total", "").await;
        assert_eq!(counted.expect("the server answers"), 1.0);
        alive[0].idle().await;
        cluster.wait_for_members(4).await;
        assert_eq!(cluster.answers(cluster.send_all(&requests(4, 300, 20))).await.len(), 4, "other requests are served");
        cluster.stop().await;
    }
}
