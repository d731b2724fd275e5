//! The same calls over TCP and directly, which must have the same results.

use crate::{
    ClusterKey,
    channel::{Arrivals, Channel, Listener, Network, PeerRole, endpoint, has_ended, server, status_text, tls::Authority},
    v1::{
        FinishReply, FinishRequest, GenerateReply, GenerateRequest, NcclControlReply, NcclControlRequest, PushReply, PushRequest,
        Waiting,
        decode_client::DecodeClient,
        decode_server::{Decode, DecodeServer},
        generate_reply::Message,
        transfer_client::TransferClient,
        transfer_server::{Transfer, TransferServer},
    },
};
use futures::{
    FutureExt, StreamExt,
    stream::{self, BoxStream},
};
use std::{
    convert::Infallible,
    future::pending,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    net::TcpListener,
    runtime::Runtime,
    sync::{mpsc, oneshot},
    time::{sleep, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status, Streaming, service::Routes};

const WAIT: Duration = Duration::from_secs(10);
const REPLY_BYTES: usize = 16 << 10;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Tcp,
    Direct,
}

const WAYS: [Way; 2] = [Way::Tcp, Way::Direct];

/// A service whose calls do what their request id says.
#[derive(Clone)]
struct Fake {
    made: Arc<AtomicUsize>,
    /// Receives a message when a call that is held is dropped.
    dropped: mpsc::UnboundedSender<()>,
}

/// A part of a call that runs.
struct Held(mpsc::UnboundedSender<()>);

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

fn reply(message: Option<Message>) -> Result<GenerateReply, Status> {
    Ok(GenerateReply { message })
}

#[tonic::async_trait]
impl Decode for Fake {
    type GenerateStream = BoxStream<'static, Result<GenerateReply, Status>>;

    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let held = Held(self.dropped.clone());
        let first = stream::iter([reply(Some(Message::Waiting(Waiting {})))]);
        let later: Self::GenerateStream = match &*request.into_inner().request_id {
            "refused" => return Err(Status::resource_exhausted("full")),
            "panics at once" => panic!("the test wants this"),
            "never answers" => {
                let _held = held;
                pending::<Infallible>().await;
                unreachable!("nothing is ready")
            }
            "panics" => stream::once(async {
                // Until then, the first message has been sent.
                sleep(Duration::from_millis(50)).await;
                panic!("the test wants this")
            })
            .boxed(),
            "fails" => stream::iter([Err(Status::aborted("no more"))]).boxed(),
            "waits" => stream::once(async move {
                let _held = held;
                pending().await
            })
            .boxed(),
            "endless" => {
                let made = Arc::clone(&self.made);
                let large = move || {
                    made.fetch_add(1, Relaxed);
                    let failure = crate::v1::Failure { message: "x".repeat(REPLY_BYTES), ..Default::default() };
                    reply(Some(Message::Failure(failure)))
                };
                stream::repeat_with(large).boxed()
            }
            _ => stream::iter([reply(None)]).boxed(),
        };
        Ok(Response::new(first.chain(later).boxed()))
    }

    async fn finish(&self, request: Request<FinishRequest>) -> Result<Response<FinishReply>, Status> {
        match &*request.into_inner().request_id {
            "" => Ok(Response::new(FinishReply {})),
            unknown => Err(Status::not_found(unknown)),
        }
    }
}

#[tonic::async_trait]
impl Transfer for Fake {
    type NcclControlStream = BoxStream<'static, Result<NcclControlReply, Status>>;

    async fn push(&self, request: Request<Streaming<PushRequest>>) -> Result<Response<PushReply>, Status> {
        let mut messages = request.into_inner();
        let mut written_blocks = 0;
        while messages.message().await?.is_some() {
            written_blocks += 1;
        }
        Ok(Response::new(PushReply { written_blocks }))
    }

    async fn nccl_control(
        &self,
        request: Request<Streaming<NcclControlRequest>>,
    ) -> Result<Response<Self::NcclControlStream>, Status> {
        let answer = |request: Result<NcclControlRequest, Status>| {
            request.map(|request| NcclControlReply { written: !request.block_indices.is_empty() })
        };
        Ok(Response::new(request.into_inner().map(answer).boxed()))
    }
}

/// A process with one [`Fake`] service, which another part of it, or another process, calls.
struct World {
    address: SocketAddr,
    network: Network,
    channel: Channel,
    fake: Fake,
    dropped: mpsc::UnboundedReceiver<()>,
    refused: Arc<AtomicUsize>,
    /// The runtime of the serving process; dropping it ends the process.
    serving: Option<Runtime>,
    end: Option<oneshot::Sender<()>>,
    ended: Option<oneshot::Receiver<()>>,
}

impl World {
    async fn new(way: Way) -> Self {
        Self::on(way, Network::tcp(ClusterKey::default())).await
    }

    async fn on(way: Way, network: Network) -> Self {
        let network = network.with_direct_calls();
        let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port is free");
        let address = socket.local_addr().expect("the socket is bound");
        let (sender, dropped) = mpsc::unbounded_channel();
        let fake = Fake { made: Arc::default(), dropped: sender };
        let mut caller = network.clone();
        caller.direct.take_if(|_| way == Way::Tcp);
        let channel = caller.expecting(&PeerRole::ALL).connect_lazy(&endpoint(&address.to_string()).expect("it is one"));
        let (refused, serving, end, ended) = Default::default();
        let mut world = Self { address, network, channel, fake, dropped, refused, serving, end, ended };
        world.serve(socket.into_std().expect("the socket is open"));
        // The service is registered before it accepts connections.
        world.decode().finish(FinishRequest::default()).await.ok();
        world
    }

    fn serve(&mut self, socket: std::net::TcpListener) {
        let runtime = Runtime::new().expect("threads can be started");
        let (decode, transfer) = (DecodeServer::new(self.fake.clone()), TransferServer::new(self.fake.clone()));
        let (network, refused) = (self.network.clone(), Arc::clone(&self.refused));
        let (end, ending) = oneshot::channel();
        let (has_ended, ended) = oneshot::channel();
        runtime.spawn(async move {
            let listener = Listener::new(Arrivals::Tcp(TcpListener::from_std(socket).expect("it is a socket")), network);
            let routes = Routes::new(decode).add_service(transfer);
            let on_refused = Arc::new(move || {
                refused.fetch_add(1, Relaxed);
            });
            listener.serve(server(), routes, on_refused, ending.map(drop)).await.expect("the socket can be served");
            let _ = has_ended.send(());
        });
        (self.serving, self.end, self.ended) = (Some(runtime), Some(end), Some(ended));
    }

    fn stop(&mut self) {
        self.serving.take().expect("the process runs").shutdown_background();
    }

    fn decode(&self) -> DecodeClient<Channel> {
        DecodeClient::new(self.channel.clone())
    }

    fn transfer(&self) -> TransferClient<Channel> {
        TransferClient::new(self.channel.clone())
    }

    async fn generate(&self, request_id: &str) -> Result<Streaming<GenerateReply>, Status> {
        let request = GenerateRequest { request_id: request_id.to_owned(), ..Default::default() };
        Ok(timeout(WAIT, self.decode().generate(request)).await.expect("the call is answered")?.into_inner())
    }

    /// Waits until calls are refused as by a process that does not run. Calls on a connection that is being closed may be cancelled.
    async fn refuses_calls(&self) {
        while !self.generate("").await.is_err_and(|refused| refused.code() == Code::Unavailable && !has_ended(&refused)) {
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Opens a stream, and receives the first message.
    async fn opened(&self, request_id: &str) -> Streaming<GenerateReply> {
        let mut replies = self.generate(request_id).await.expect("the call is accepted");
        assert!(matches!(next(&mut replies).await, Ok(Some(GenerateReply { message: Some(Message::Waiting(_)) }))));
        replies
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // A runtime must not block the test's own one.
        self.serving.take().into_iter().for_each(Runtime::shutdown_background);
    }
}

async fn next<T>(replies: &mut Streaming<T>) -> Result<Option<T>, Status> {
    timeout(WAIT, replies.message()).await.expect("a message or the end arrives")
}

#[tokio::test]
async fn calls_of_all_kinds_are_answered() {
    for way in WAYS {
        let world = World::new(way).await;
        world.decode().finish(FinishRequest::default()).await.expect("the call succeeds");
        let unknown = FinishRequest { request_id: "täglich".to_owned(), ..Default::default() };
        let unknown = world.decode().finish(unknown).await.expect_err("the service refuses it");
        assert_eq!((unknown.code(), unknown.message(), has_ended(&unknown)), (Code::NotFound, "täglich", false));

        let mut replies = world.opened("one more").await;
        assert!(matches!(next(&mut replies).await, Ok(Some(GenerateReply { message: None }))));
        assert!(matches!(next(&mut replies).await, Ok(None)));

        let messages = stream::iter(vec![PushRequest::default(); 100]);
        assert_eq!(world.transfer().push(messages).await.expect("the call succeeds").into_inner().written_blocks, 100);

        let (requests, receiver) = mpsc::channel(1);
        let replies = world.transfer().nccl_control(ReceiverStream::new(receiver)).await.expect("the call succeeds");
        let mut replies = replies.into_inner();
        for block in 0..20 {
            let request = NcclControlRequest { block_indices: vec![block; block as usize], ..Default::default() };
            requests.send(request).await.expect("the stream is open");
            assert_eq!(next(&mut replies).await.expect("it is answered"), Some(NcclControlReply { written: block > 0 }));
        }
        drop(requests);
        assert!(matches!(next(&mut replies).await, Ok(None)), "{way:?}");
    }
}

#[tokio::test]
async fn failures_of_a_service_are_answers() {
    for way in WAYS {
        let world = World::new(way).await;
        let refused = world.generate("refused").await.expect_err("the service refuses it");
        assert_eq!((refused.code(), refused.message(), has_ended(&refused)), (Code::ResourceExhausted, "full", false));
        let mut replies = world.opened("fails").await;
        let failed = next(&mut replies).await.expect_err("the stream fails");
        assert_eq!((failed.code(), failed.message(), has_ended(&failed)), (Code::Aborted, "no more", false));
    }
}

#[tokio::test]
async fn panic_of_a_service_breaks_only_its_call() {
    for way in WAYS {
        let world = World::new(way).await;
        let broken = world.generate("panics at once").await.expect_err("the service panics");
        assert!(has_ended(&broken), "{way:?}: {broken:?}");
        let mut replies = world.opened("panics").await;
        let broken = next(&mut replies).await.expect_err("the service panics");
        assert!(has_ended(&broken), "{way:?}: {broken:?}");
        world.opened("waits").await;
    }
}

#[tokio::test]
async fn dropped_call_ends_at_the_service() {
    for way in WAYS {
        let mut world = World::new(way).await;
        let waits = world.opened("waits").await;
        assert!(world.dropped.try_recv().is_err());
        drop(waits);
        if way == Way::Direct {
            world.dropped.try_recv().expect("the stream is dropped with its caller's");
        } else {
            timeout(WAIT, world.dropped.recv()).await.expect("the stream is dropped");
        }
        assert!(timeout(Duration::from_millis(100), world.generate("never answers")).await.is_err());
        timeout(WAIT, world.dropped.recv()).await.expect("the call is dropped");
    }
}

#[tokio::test]
async fn end_of_the_serving_process_breaks_its_calls() {
    for way in WAYS {
        let mut world = World::new(way).await;
        let mut waits = world.opened("waits").await;
        let ((), broken) = tokio::join!(async { world.stop() }, next(&mut waits));
        let broken = broken.expect_err("the process has ended");
        assert!(has_ended(&broken) && !status_text(&broken).is_empty(), "{way:?}: {broken:?}");
        // The socket is closed when the last thread of the runtime has ended.
        world.refuses_calls().await;

        let again = std::net::TcpListener::bind(world.address).expect("the address is free again");
        again.set_nonblocking(true).expect("it is a socket");
        world.serve(again);
        world.opened("waits").await;
    }
}

#[tokio::test]
async fn drained_service_refuses_calls_and_ends_with_its_last_one() {
    for way in WAYS {
        let mut world = World::new(way).await;
        let (requests, receiver) = mpsc::channel(1);
        let open = world.transfer().nccl_control(ReceiverStream::new(receiver)).await.expect("the call succeeds");
        let mut open = open.into_inner();
        let mut ended = world.ended.take().expect("the service runs");
        world.end.take().expect("the service runs").send(()).expect("the service runs");
        world.refuses_calls().await;
        assert!(timeout(Duration::from_millis(100), &mut ended).await.is_err(), "{way:?}: a call runs");
        requests.send(NcclControlRequest::default()).await.expect("the stream is open");
        assert!(matches!(next(&mut open).await, Ok(Some(_))), "{way:?}");
        drop(requests);
        assert!(matches!(next(&mut open).await, Ok(None)), "{way:?}");
        drop(open);
        timeout(WAIT, ended).await.expect("no call runs").expect("the server has not failed");
    }
}

#[tokio::test]
async fn calls_without_the_key_are_refused() {
    let key = |text: &str| ClusterKey::new(text.repeat(32).as_bytes()).expect("it is long enough");
    for way in WAYS {
        let mut world = World::on(way, Network::tcp(key("a"))).await;
        world.opened("waits").await;
        let mut stranger = Network::tcp(key("b"));
        stranger.direct = world.network.direct.clone().filter(|_| way == Way::Direct);
        world.channel = stranger.connect_lazy(&endpoint(&world.address.to_string()).expect("it is one"));
        assert_eq!(world.generate("").await.expect_err("the key is wrong").code(), Code::Unauthenticated, "{way:?}");
        assert_eq!(world.refused.load(Relaxed), 1);
    }
}

#[tokio::test]
async fn direct_calls_need_no_role() {
    let tls = Authority::new().tls("c", PeerRole::Router);
    let world = World::on(Way::Direct, Network::default().with_tls(Some(tls.clone()))).await;
    world.opened("waits").await;
    let world = World::on(Way::Tcp, Network::default().with_tls(Some(tls))).await;
    assert_eq!(world.generate("").await.expect_err("routers generate nothing").code(), Code::PermissionDenied);
}

#[tokio::test]
async fn messages_above_the_limits_are_refused() {
    for way in WAYS {
        let world = World::new(way).await;
        let mut client = world.decode().max_decoding_message_size(REPLY_BYTES / 2);
        let request = GenerateRequest { request_id: "endless".to_owned(), ..Default::default() };
        let mut replies = client.generate(request).await.expect("the call is accepted").into_inner();
        assert!(matches!(next(&mut replies).await, Ok(Some(_))));
        assert_eq!(next(&mut replies).await.expect_err("it is too large").code(), Code::OutOfRange, "{way:?}");
        // A server decodes at most 4 MiB, unless it has another limit.
        let request = GenerateRequest { account: "x".repeat(5 << 20), ..Default::default() };
        let refused = world.decode().generate(request).await.expect_err("it is too large");
        assert_eq!((refused.code(), has_ended(&refused)), (Code::OutOfRange, false), "{way:?}");
    }
}

#[tokio::test]
async fn service_waits_for_a_caller_that_does_not_read() {
    for way in WAYS {
        let world = World::new(way).await;
        let mut replies = world.opened("endless").await;
        sleep(Duration::from_millis(100)).await;
        let made = world.fake.made.load(Relaxed);
        // Over TCP, the stream's window of 32 KiB is full.
        assert!(made <= 8, "{way:?}: {made} replies were made");
        for _ in 0..100 {
            next(&mut replies).await.expect("the stream has no end");
        }
        assert!(world.fake.made.load(Relaxed) >= 100);
    }
}
