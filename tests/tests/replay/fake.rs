//! A server with the OpenAI API whose answers a test determines.

use anyhow::Result;
use axum::{
    Json, Router,
    body::Body,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use futures::{StreamExt, stream};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::{io, sync::Arc, time::Duration};
use tokio::{
    net::TcpListener,
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
    time::{Instant, sleep},
};

/// How a request is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behaviour {
    /// The answer has this many tokens.
    Tokens(u64),
    /// The answer has this many tokens, and none of them has text.
    Textless(u64),
    /// The answer has this status and an error.
    Refuse(u16),
    /// A token, then an error event.
    ErrorEvent,
    /// A token, then an event that is not JSON.
    Malformed,
    /// A token, then the end of the stream.
    Cut,
    /// A token, then the connection is lost.
    Lost,
    /// A token, then nothing, while the connection stays open.
    Stall,
    /// The whole answer as JSON, not as a stream.
    Whole,
}

/// A server that runs until it is dropped.
pub struct Fake {
    pub url: String,
    server: Arc<Server>,
    _serving: JoinSet<()>,
}

struct Server {
    behaviour: Box<dyn Fn(&Value) -> Behaviour + Send + Sync>,
    tokenizes: bool,
    /// Each answer takes a permit before it begins.
    permits: Arc<Semaphore>,
    /// The time that an answer holds its permit.
    holds: Duration,
    requests: Mutex<Vec<Arrived>>,
    in_flight: Mutex<(usize, usize)>,
}

/// A request that has arrived.
#[derive(Clone, Debug)]
pub struct Arrived {
    pub at: Instant,
    pub body: Value,
    pub authorization: Option<String>,
}

/// The behaviour of a fake server.
pub struct Settings {
    /// The number of answers that may begin at the start; [`Fake::allow`] adds more.
    pub permits: usize,
    /// The time for which an answer holds its permit. Permits are given back.
    pub holds: Duration,
    /// Whether the server has `/tokenize`, whose tokens are bytes.
    pub tokenizes: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self { permits: Semaphore::MAX_PERMITS, holds: Duration::ZERO, tokenizes: true }
    }
}

impl Fake {
    /// Starts a server at a free port.
    pub async fn start(settings: Settings, behaviour: impl Fn(&Value) -> Behaviour + Send + Sync + 'static) -> Result<Self> {
        let server = Arc::new(Server {
            behaviour: Box::new(behaviour),
            tokenizes: settings.tokenizes,
            permits: Arc::new(Semaphore::new(settings.permits)),
            holds: settings.holds,
            requests: Mutex::default(),
            in_flight: Mutex::default(),
        });
        let app = Router::new()
            .route("/v1/models", get(async || Json(json!({ "data": [{ "id": "fake", "owned_by": "test" }] }))))
            .route("/tokenize", post(tokenize))
            .route("/v1/completions", post(answer))
            .route("/v1/chat/completions", post(answer))
            .with_state(Arc::clone(&server));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let mut serving = JoinSet::new();
        serving.spawn(async move { axum::serve(listener, app).await.expect("the server runs until it is dropped") });
        Ok(Self { url, server, _serving: serving })
    }

    /// Returns the requests so far.
    pub fn requests(&self) -> Vec<Arrived> {
        self.server.requests.lock().clone()
    }

    /// Lets this many more answers begin.
    pub fn allow(&self, answers: usize) {
        self.server.permits.add_permits(answers);
    }

    /// Returns the largest number of requests that were in flight.
    pub fn in_flight_max(&self) -> usize {
        self.server.in_flight.lock().1
    }
}

async fn tokenize(State(server): State<Arc<Server>>, Json(body): Json<Value>) -> Response {
    match (server.tokenizes, body["prompt"].as_str()) {
        (true, Some(text)) => Json(json!({ "count": text.len() })).into_response(),
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

/// Counts a request in flight until it is dropped.
struct InFlight(Arc<Server>, Option<OwnedSemaphorePermit>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.lock().0 -= 1;
    }
}

async fn answer(State(server): State<Arc<Server>>, headers: axum::http::HeaderMap, Json(body): Json<Value>) -> Response {
    let authorization = headers.get("authorization").and_then(|value| value.to_str().ok()).map(str::to_owned);
    let behaviour = (server.behaviour)(&body);
    let number = {
        let mut requests = server.requests.lock();
        requests.push(Arrived { at: Instant::now(), body: body.clone(), authorization });
        let mut in_flight = server.in_flight.lock();
        in_flight.0 += 1;
        in_flight.1 = in_flight.1.max(in_flight.0);
        requests.len()
    };
    let mut in_flight = InFlight(Arc::clone(&server), None);
    let permit = Arc::clone(&server.permits).acquire_owned().await.expect("the semaphore is never closed");
    in_flight.1 = Some(permit);
    sleep(server.holds).await;
    let token =
        || json!({ "choices": [{ "index": 0, "text": "a", "delta": { "content": format!("answer {number}") } }] }).to_string();
    let events = match behaviour {
        Behaviour::Refuse(status) => {
            let status = StatusCode::from_u16(status).expect("the status is valid");
            return (status, Json(json!({ "error": { "message": "refused by the test" } }))).into_response();
        }
        Behaviour::Whole => return Json(json!({ "choices": [] })).into_response(),
        Behaviour::Tokens(tokens) => {
            let others =
                (1..tokens).map(|_| json!({ "choices": [{ "index": 0, "text": "b", "delta": { "content": "!" } }] }).to_string());
            [token()].into_iter().chain(others).chain(end_of_answer(&body, tokens)).collect()
        }
        Behaviour::Textless(tokens) => end_of_answer(&body, tokens).to_vec(),
        Behaviour::ErrorEvent => vec![token(), json!({ "error": { "message": "failed by the test" } }).to_string()],
        Behaviour::Malformed => vec![token(), "nonsense".to_owned()],
        Behaviour::Cut | Behaviour::Lost | Behaviour::Stall => vec![token()],
    };
    let events = stream::iter(events).map(|event| Ok::<_, io::Error>(format!("data: {event}\n\n")));
    // The guards live as long as the answer.
    let end = stream::once(async move {
        let _in_flight = in_flight;
        match behaviour {
            Behaviour::Stall => std::future::pending().await,
            Behaviour::Lost => {
                // The server sends what it has before it waits.
                sleep(Duration::from_millis(50)).await;
                Err(io::Error::other("lost by the test"))
            }
            _ => Ok(String::new()),
        }
    });
    let mut response = Response::new(Body::from_stream(events.chain(end)));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, "text/event-stream".parse().expect("the value is valid"));
    headers.insert("x-worker", format!("worker-{}", number % 2).parse().expect("the value is valid"));
    response
}

/// Returns the last two events of an answer of this many tokens.
fn end_of_answer(body: &Value, tokens: u64) -> [String; 2] {
    let usage = json!({ "prompt_tokens": prompt_tokens(body), "completion_tokens": tokens, "prompt_tokens_details": null });
    [json!({ "choices": [], "usage": usage }).to_string(), "[DONE]".to_owned()]
}

fn prompt_tokens(body: &Value) -> usize {
    match &body["prompt"] {
        Value::String(text) => text.len(),
        Value::Array(ids) => ids.len(),
        _ => body["messages"].to_string().len(),
    }
}
