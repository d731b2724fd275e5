//! A frontend with several fake routers, each of which may place, refuse, hang, drain or be lost.

use crate::support::*;
use hyper::StatusCode;
use serde_json::json;
use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};
use tandem_proto::v1::{
    AnswerFinished, BookingsReply, BookingsRequest, Candidate, Draining, ExistingPlacement, ExplainReply, ExplainRequest,
    Failure, FailureReason, Placement, PrefillFinished, RoutePrompt, RouteReply, RouteRequest, WorkerRef, WorkersReply,
    WorkersRequest,
    finished::FinishReason,
    route_reply,
    route_request::Message,
    router_server::{Router, RouterServer},
};
use tokio::{net::TcpListener, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    Well,
    /// The router refuses streams and reports that it is not ready.
    NotReady,
    /// The router accepts streams but never answers.
    Silent,
}

struct Fake {
    number: usize,
    mode: Arc<Mutex<Mode>>,
    opened: mpsc::UnboundedSender<Opened>,
}

/// A stream that the frontend has opened with a router.
struct Opened {
    router: usize,
    prompt: RoutePrompt,
    requests: Streaming<RouteRequest>,
    replies: mpsc::Sender<Result<RouteReply, Status>>,
}

struct Routers {
    modes: [Arc<Mutex<Mode>>; 2],
    opened: mpsc::UnboundedReceiver<Opened>,
}

#[tonic::async_trait]
impl Router for Fake {
    type RouteStream = ReceiverStream<Result<RouteReply, Status>>;

    async fn route(
        &self,
        request: tonic::Request<Streaming<RouteRequest>>,
    ) -> Result<tonic::Response<Self::RouteStream>, Status> {
        let mode = *self.mode.lock().expect("no test panics with the lock");
        let mut requests = request.into_inner();
        let first = requests.message().await?.and_then(|request| request.message);
        let Some(Message::Prompt(prompt)) = first else { return Err(Status::invalid_argument("no prompt")) };
        let (replies, stream) = mpsc::channel(8);
        self.opened.send(Opened { router: self.number, prompt, requests, replies }).ok();
        match mode {
            Mode::Well => Ok(tonic::Response::new(ReceiverStream::new(stream))),
            Mode::NotReady => Err(Status::unavailable("not yet")),
            Mode::Silent => std::future::pending().await,
        }
    }

    type BookingsStream = ReceiverStream<Result<BookingsReply, Status>>;

    async fn bookings(&self, _: tonic::Request<BookingsRequest>) -> Result<tonic::Response<Self::BookingsStream>, Status> {
        Err(Status::unimplemented("only routers call this method"))
    }

    async fn explain(&self, _: tonic::Request<ExplainRequest>) -> Result<tonic::Response<ExplainReply>, Status> {
        match *self.mode.lock().expect("no test panics with the lock") {
            Mode::Well => Ok(tonic::Response::new(ExplainReply { explanation: self.number.to_string(), ..Default::default() })),
            Mode::NotReady | Mode::Silent => Err(Status::unavailable("not now")),
        }
    }

    async fn workers(&self, _: tonic::Request<WorkersRequest>) -> Result<tonic::Response<WorkersReply>, Status> {
        let mode = *self.mode.lock().expect("no test panics with the lock");
        let unavailable_reason = match mode {
            Mode::Well => None,
            Mode::NotReady => Some("no decode worker".to_owned()),
            Mode::Silent => std::future::pending().await,
        };
        Ok(tonic::Response::new(WorkersReply { unavailable_reason, ..Default::default() }))
    }
}

/// Starts a cluster whose frontend knows two routers.
async fn two() -> (Cluster, Routers) {
    let (opened, streams) = mpsc::unbounded_channel();
    let (mut modes, mut addresses) = (Vec::new(), Vec::new());
    for number in 0..2 {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        addresses.push(listener.local_addr().expect("the listener is bound").to_string());
        let mode = Arc::new(Mutex::new(Mode::Well));
        modes.push(Arc::clone(&mode));
        let fake = Fake { number, mode, opened: opened.clone() };
        let serve = tonic::transport::Server::builder().add_service(RouterServer::new(fake));
        tokio::spawn(serve.serve_with_incoming(tandem_proto::channel::incoming(listener)));
    }
    let cluster = Cluster::with(|settings| settings.routers = addresses.into_iter().collect()).await;
    let modes = modes.try_into().expect("there are two routers");
    (cluster, Routers { modes, opened: streams })
}

impl Routers {
    fn set(&self, router: usize, mode: Mode) {
        *self.modes[router].lock().expect("no test panics with the lock") = mode;
    }

    async fn opened(&mut self) -> Opened {
        soon(self.opened.recv()).await.expect("the fake routers run")
    }
}

impl Opened {
    async fn send(&self, message: route_reply::Message) {
        self.replies.send(Ok(RouteReply { message: Some(message) })).await.expect("the frontend listens");
    }

    async fn place(&self, decode: SocketAddr) {
        let worker = |name: &str, address: String| {
            let (worker_id, instance_id) = (name.to_owned(), format!("{name}-instance"));
            let worker = Some(WorkerRef { worker_id, instance_id, address, ..Default::default() });
            Candidate { worker, ..Candidate::default() }
        };
        let (decode, prefill) = (worker("d0", decode.to_string()), worker("p0", "127.0.0.1:1".to_owned()));
        let placement = Placement { decode: Some(decode), prefill: Some(prefill), block_size: 16, ..Placement::default() };
        self.send(route_reply::Message::Placement(placement)).await;
    }

    async fn receives(&mut self) -> Option<Message> {
        soon(self.requests.message()).await.ok().flatten().and_then(|request| request.message)
    }
}

fn existing(prefilling: bool) -> Option<ExistingPlacement> {
    let prefill_instance_id = Some("p0-instance".to_owned());
    Some(ExistingPlacement { decode_instance_id: "d0-instance".to_owned(), prefill_instance_id, prefilling })
}

#[tokio::test]
async fn requests_go_round_robin_to_healthy_routers() {
    let (mut cluster, mut routers) = two().await;
    let mut seen = [0, 0];
    let mut ask = async |cluster: &mut Cluster, routers: &mut Routers, refused: bool| {
        let reply = cluster.spawn_post(CHAT, chat(json!({})));
        let mut opened = routers.opened().await;
        seen[opened.router] += 1;
        if refused && opened.router == 0 {
            opened = routers.opened().await;
            assert_eq!(opened.router, 1, "the other router is used immediately");
            seen[1] += 1;
        }
        opened.place(cluster.decode).await;
        cluster.call().await.answer(Some(0), "x").await;
        assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
        seen
    };
    for _ in 0..3 {
        ask(&mut cluster, &mut routers, false).await;
    }
    let seen = ask(&mut cluster, &mut routers, false).await;
    assert_eq!(seen, [2, 2]);
    cluster.counted("tandem_frontend_routers 2").await;

    routers.set(0, Mode::NotReady);
    for _ in 0..5 {
        ask(&mut cluster, &mut routers, true).await;
    }
    let seen = ask(&mut cluster, &mut routers, true).await;
    assert!(seen[0] <= 3 && seen[1] == 8, "a failed router is used last: {seen:?}");
    assert_eq!(cluster.get("/ready").await.0, StatusCode::OK, "one ready router is enough");
    let explained = cluster.send(hyper::Method::POST, CHAT, &[("x-tandem-explain", "true")], chat(json!({})).to_string()).await;
    assert_eq!(explained.json().await.1["prompts"][0]["explanation"], "1");
    routers.set(1, Mode::NotReady);
    let (status, body) = cluster.get("/ready").await;
    assert_eq!((status, &body["status"]), (StatusCode::SERVICE_UNAVAILABLE, &json!("no decode worker")));

    routers.set(0, Mode::Well);
    cluster.counted("tandem_frontend_routers 1").await;
    let seen_again = ask(&mut cluster, &mut routers, false).await;
    assert_eq!(seen_again[0], seen[0] + 1, "the recovered router is used again");
}

#[tokio::test]
async fn request_is_placed_by_another_router_if_the_first_does_not_answer() {
    let (mut cluster, mut routers) = two().await;
    routers.set(0, Mode::Silent);
    for _ in 0..2 {
        let reply = cluster.spawn_post(CHAT, chat(json!({})));
        let mut opened = routers.opened().await;
        if opened.router == 0 {
            let mut silent = opened;
            opened = routers.opened().await;
            assert_eq!(silent.receives().await, None, "the silent router's stream is closed, so it keeps no booking");
        }
        assert_eq!(opened.router, 1);
        opened.place(cluster.decode).await;
        cluster.call().await.answer(Some(0), "x").await;
        assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
    }
}

/// Sends the request twice, so that each of the two routers is tried first.
#[tokio::test]
async fn refusal_of_one_router_is_returned_although_another_router_does_not_answer() {
    let (cluster, mut routers) = two().await;
    routers.set(0, Mode::Silent);
    for _ in 0..2 {
        let reply = cluster.spawn_post(CHAT, chat(json!({})));
        let opened = loop {
            let opened = routers.opened().await;
            if opened.router == 1 {
                break opened;
            }
        };
        let failure = Failure { reason: FailureReason::AtCapacity.into(), ..Failure::default() };
        opened.send(route_reply::Message::Failure(failure)).await;
        assert_eq!(refused(reply).await, (StatusCode::SERVICE_UNAVAILABLE, Some("1".to_owned()), json!("no_worker")));
    }
}

#[tokio::test]
async fn running_request_is_rebooked_when_its_router_is_lost() {
    let (mut cluster, mut routers) = two().await;
    let reply = cluster.spawn_post(CHAT, chat(json!({ "stream": true })));
    let first = routers.opened().await;
    assert_eq!(first.prompt.existing, None);
    first.place(cluster.decode).await;
    let call = cluster.call().await;
    // The first router is lost before the first token.
    routers.set(first.router, Mode::NotReady);
    drop(first.replies);
    let mut second = routers.opened().await;
    if second.router == first.router {
        second = routers.opened().await;
    }
    assert_eq!(second.prompt, RoutePrompt { existing: existing(true), ..first.prompt.clone() });
    call.begin(Some(0)).await;
    call.send(tokens(0, b"ab")).await;
    assert_eq!(second.receives().await, Some(Message::PrefillFinished(PrefillFinished { cached_tokens: Some(0) })));
    // The second router is lost after the first token. At first no other router is available, but the answer continues.
    routers.set(second.router, Mode::NotReady);
    cluster.counted("tandem_frontend_rebooked_total 1").await;
    drop(second.replies);
    cluster.counted("tandem_frontend_routers 0").await;
    call.send(tokens(0, b"cd")).await;
    routers.set(first.router, Mode::Well);
    let mut third = routers.opened().await;
    while third.router != first.router {
        third = routers.opened().await;
    }
    assert_eq!(third.prompt.existing, existing(false));
    cluster.counted("tandem_frontend_rebooked_total 2").await;
    // Then the worker is lost, too. The router that books the request now places it again.
    call.fail(Status::unavailable("killed")).await;
    let Some(Message::Failed(failed)) = third.receives().await else { panic!("the router receives the failure") };
    assert_eq!((failed.instance_id.as_str(), failed.generated_tokens), ("d0-instance", 4));
    third.place(cluster.decode).await;
    let call = cluster.call().await;
    assert_eq!(call.request.generated[0].tokens.len(), 4);
    call.begin(Some(0)).await;
    call.send(tokens(0, b"ef")).await;
    call.send(finished(0, FinishReason::Length, None)).await;
    let (events, done) = soon(reply).await.expect("the client task runs").events().await;
    let text: String = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert!(done && text == "abcdef", "{text}");
    assert_eq!(third.receives().await, Some(Message::PrefillFinished(PrefillFinished { cached_tokens: None })));
    assert_eq!(third.receives().await, Some(Message::AnswerFinished(AnswerFinished { generated_tokens: 6 })));
    assert_eq!(third.receives().await, None, "the booking is released");
    cluster.counted("tandem_frontend_inflight_requests 0").await;
}

#[tokio::test]
async fn failed_attempt_is_rerouted_by_another_router_without_the_failed_worker() {
    let (mut cluster, mut routers) = two().await;
    let reply = cluster.spawn_post(CHAT, chat(json!({})));
    let first = routers.opened().await;
    first.place(cluster.decode).await;
    let call = cluster.call().await;
    routers.set(first.router, Mode::NotReady);
    // The router and the prefill worker are lost at the same time, and the frontend may notice either first.
    drop(first.replies);
    call.send(tandem_proto::v1::generate_reply::Message::Failure(failure(FailureReason::PrefillLost, "p0-instance"))).await;
    let received = loop {
        let mut second = routers.opened().await;
        if second.router != first.router
            && let Some(received) = second.receives().await
        {
            assert_eq!(second.prompt.existing, existing(true));
            second.place(cluster.decode).await;
            break (received, second);
        }
    };
    let (Message::Failed(failed), _second) = received else { panic!("the router receives the failure: {:?}", received.0) };
    assert_eq!(failed.instance_id, "p0-instance");
    cluster.call().await.answer(Some(0), "x").await;
    assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
}

#[tokio::test]
async fn draining_router_keeps_a_booking_until_another_router_has_it() {
    let (mut cluster, mut routers) = two().await;
    let reply = cluster.spawn_post(CHAT, chat(json!({ "stream": true })));
    let mut first = routers.opened().await;
    let other = 1 - first.router;
    first.place(cluster.decode).await;
    let call = cluster.call().await;
    call.begin(Some(0)).await;
    call.send(tokens(0, b"ab")).await;
    assert!(matches!(first.receives().await, Some(Message::PrefillFinished(_))));
    routers.set(0, Mode::NotReady);
    routers.set(1, Mode::NotReady);
    cluster.counted("tandem_frontend_routers 0").await;
    first.send(route_reply::Message::Draining(Draining {})).await;
    // No other router is available, so the draining router places the request again.
    call.fail(Status::unavailable("killed")).await;
    assert!(matches!(first.receives().await, Some(Message::Failed(_))));
    first.place(cluster.decode).await;
    let call = cluster.call().await;
    call.begin(Some(0)).await;
    call.send(tokens(0, b"cd")).await;
    assert!(matches!(first.receives().await, Some(Message::PrefillFinished(_))));
    routers.set(other, Mode::Well);
    let mut second = routers.opened().await;
    while second.router != other || second.prompt.existing != existing(false) {
        second = routers.opened().await;
    }
    assert_eq!(first.receives().await, None, "the first router's stream is closed when another router has the booking");
    call.send(finished(0, FinishReason::Length, None)).await;
    let (_, done) = soon(reply).await.expect("the client task runs").events().await;
    assert!(done);
    assert_eq!(second.receives().await, Some(Message::AnswerFinished(AnswerFinished { generated_tokens: 4 })));
    assert_eq!(second.receives().await, None);
    cluster.counted("tandem_frontend_rebooked_total 1").await;
}
