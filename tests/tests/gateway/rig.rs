//! A gateway as Envoy is one, with an endpoint picker and fake vLLM servers.

use crate::encrypted;
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::{net::SocketAddr, time::Duration};
use tandem::{
    Cluster,
    settings::{EngineKind, PickerPorts, UpSettings},
};
use tandem_proto::{
    ext_proc::{
        BodyResponse, BodySendMode, HeaderMap, HeaderMutation, HeaderValue, HttpBody, HttpHeaders, HttpTrailers,
        ImmediateResponse, ListValue, Metadata, ProcessingRequest, ProcessingResponse, ProtocolConfiguration, Struct,
        Value as MetadataValue, external_processor_client::ExternalProcessorClient, processing_request::Request,
        processing_response::Response, value::Kind,
    },
    v1::{WorkersReply, WorkersRequest, router_client::RouterClient},
};
use tandem_tests::fake_vllm::{FakeSettings, FakeVllm, tokenizer};
use tempfile::TempDir;
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Status, Streaming,
    transport::{Channel, Endpoint},
};

/// Time limit of every wait. Only a failing test waits this long.
pub const LIMIT: Duration = Duration::from_secs(30);

/// The largest piece of a body that a gateway takes.
const PIECE_MAX: usize = 64 << 10;
pub const DESTINATION: &str = "x-gateway-destination-endpoint";

/// A gateway with its picker and servers.
pub struct Gateway {
    pub engines: Vec<FakeVllm>,
    pub cluster: Cluster,
    pub channel: Channel,
    pub folder: TempDir,
    change: fn(&mut UpSettings),
}

/// One HTTP request of the gateway, and the stream that stands for it.
pub struct Exchange {
    messages: mpsc::Sender<ProcessingRequest>,
    answers: Streaming<ProcessingResponse>,
}

/// The answer to a request's head and body.
#[derive(Debug)]
pub enum Picked {
    /// The value of the header with the endpoints, and the body for the server.
    Sent { endpoints: String, body: Vec<u8> },
    /// The status, body and headers with which the gateway answers the client.
    Refused { status: i32, body: String, headers: Vec<(String, String)> },
}

impl Picked {
    pub fn sent(self) -> Result<(String, Vec<u8>)> {
        match self {
            Self::Sent { endpoints, body } => Ok((endpoints, body)),
            refused @ Self::Refused { .. } => bail!("{refused:?}"),
        }
    }

    pub fn status(&self) -> i32 {
        match self {
            Self::Sent { .. } => 200,
            Self::Refused { status, .. } => *status,
        }
    }
}

impl Gateway {
    pub async fn start(engines: usize) -> Result<Self> {
        Self::with(engines, FakeSettings::default(), |_| {}).await
    }

    pub async fn with(engines: usize, fake: FakeSettings, change: fn(&mut UpSettings)) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        tokenizer::write(folder.path())?;
        std::fs::write(folder.path().join("key"), "the secret of a cluster behind a gateway")?;
        let mut all = Vec::new();
        for _ in 0..engines {
            all.push(FakeVllm::start(FakeSettings { root: Some(folder.path().to_owned()), ..fake.clone() }).await?);
        }
        let (cluster, channel) = start(&all, &folder, ([127, 0, 0, 1], 0).into(), change).await?;
        Ok(Self { engines: all, cluster, channel, folder, change })
    }

    /// Ends the picker and starts it again at the same address. The servers keep running.
    pub async fn restart(self) -> Result<Self> {
        let Self { engines, cluster, folder, change, .. } = self;
        let address = cluster.frontend;
        cluster.stop().await;
        let (cluster, channel) = start(&engines, &folder, address, change).await?;
        Ok(Self { engines, cluster, channel, folder, change })
    }

    /// Opens a stream and sends messages.
    pub async fn open(&self, messages: impl IntoIterator<Item = ProcessingRequest>) -> Result<Exchange> {
        let (sender, receiver) = mpsc::channel(1_024);
        for message in messages {
            sender.send(message).await?;
        }
        let answers =
            ExternalProcessorClient::new(self.channel.clone()).process(ReceiverStream::new(receiver)).await?.into_inner();
        Ok(Exchange { messages: sender, answers })
    }

    /// Opens the stream of a request and sends its head and body.
    pub async fn request(&self, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Result<(Exchange, Picked)> {
        self.request_to(None, path, headers, body).await
    }

    /// Like [`Gateway::request`], for a gateway that limits the choice to these endpoints.
    pub async fn request_to(
        &self,
        subset: Option<&[&str]>,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Result<(Exchange, Picked)> {
        let mut messages = vec![head("POST", path, headers, subset)];
        messages.extend(chunks(body));
        let mut exchange = self.open(messages).await?;
        let picked = match exchange.picked().await? {
            Picked::Sent { endpoints, .. } => Picked::Sent { endpoints, body: exchange.request_body().await? },
            refused @ Picked::Refused { .. } => refused,
        };
        Ok((exchange, picked))
    }

    /// Sends a completion to the server that the picker has chosen, and its answer through the picker. Returns the server's index and its usage.
    pub async fn complete(&self, prompt: &str, headers: &[(&str, &str)]) -> Result<(usize, Value)> {
        let body = json!({ "model": "fake", "prompt": prompt, "max_tokens": 4 }).to_string();
        let (mut exchange, picked) = self.request("/v1/completions", headers, body.as_bytes()).await?;
        let (endpoints, body) = picked.sent()?;
        let answer = exchange.answer(&endpoints, "/v1/completions", body).await?;
        Ok((self.index_of(&endpoints)?, answer["usage"].clone()))
    }

    pub fn endpoint(&self, engine: usize) -> String {
        format!("127.0.0.1:{}", self.engines[engine].port())
    }

    pub fn index_of(&self, endpoint: &str) -> Result<usize> {
        (0..self.engines.len()).find(|at| self.endpoint(*at) == endpoint).with_context(|| format!("{endpoint} is no engine"))
    }

    pub async fn view(&self) -> Result<WorkersReply> {
        Ok(RouterClient::new(self.cluster.to_router()).workers(WorkersRequest {}).await?.into_inner())
    }

    pub async fn bookings(&self) -> Result<u32> {
        Ok(self.view().await?.bookings)
    }

    /// Returns the number of requests that are booked on the server at this endpoint.
    pub async fn bookings_at(&self, endpoint: &str) -> Result<u32> {
        let workers = self.view().await?.workers;
        let of = workers.iter().find(|worker| worker.info.as_ref().is_some_and(|info| info.engine_endpoint == endpoint));
        Ok(of.context("no worker has this endpoint")?.bookings)
    }

    /// Waits until the router knows all blocks in the engines' caches, and nothing is booked. An engine's block is two of the cluster's.
    pub async fn indexed(&self) -> Result<()> {
        until("the index knows all cached blocks", async || {
            let view = self.view().await?;
            let indexed: u64 = view.workers.iter().map(|worker| worker.indexed_blocks).sum();
            let cached: u64 = self.engines.iter().map(|engine| engine.cached_blocks() as u64).sum();
            Ok(view.bookings == 0 && indexed == 2 * cached)
        })
        .await
    }
}

async fn start(
    engines: &[FakeVllm],
    folder: &TempDir,
    address: SocketAddr,
    change: fn(&mut UpSettings),
) -> Result<(Cluster, Channel)> {
    let mut settings = UpSettings::defaults();
    settings.model.engine = EngineKind::Vllm;
    settings.common.listen = address;
    settings.common.key.cluster_key_file = Some(folder.path().join("key"));
    settings.worker.external.engine_url = engines.iter().map(FakeVllm::url).collect();
    settings.frontend.limits.max_body_bytes = Some(10 << 20);
    settings.picker = Some(PickerPorts::default());
    change(&mut settings);
    let has_tls =
        settings.picker.is_some_and(|picker| picker.args.tls_self_signed) || settings.frontend.tenants.tls_cert.is_some();
    let cluster = Cluster::start(settings).await?;
    let endpoint = Endpoint::from_shared(format!("http://{}", cluster.frontend))?;
    let channel = if has_tls {
        endpoint.connect_with_connector(encrypted::Dialer(cluster.frontend)).await?
    } else {
        endpoint.connect().await?
    };
    Ok((cluster, channel))
}

pub async fn until(what: &str, mut holds: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let polling = async {
        while !holds().await? {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        anyhow::Ok(())
    };
    timeout(LIMIT, polling).await.with_context(|| format!("in vain: {what}"))?
}

fn text(text: &str) -> MetadataValue {
    MetadataValue { kind: Some(Kind::StringValue(text.to_owned())) }
}

/// Returns metadata with one field in a namespace.
pub fn metadata(namespace: &str, key: &str, value: MetadataValue) -> Metadata {
    let fields = Struct { fields: [(key.to_owned(), value)].into() };
    Metadata { filter_metadata: [(namespace.to_owned(), fields)].into() }
}

pub fn served(endpoint: &str) -> Metadata {
    metadata("envoy.lb", "x-gateway-destination-endpoint-served", text(endpoint))
}

fn header(key: &str, value: &str) -> HeaderValue {
    HeaderValue { key: key.to_owned(), value: String::new(), raw_value: value.to_owned().into() }
}

/// Returns the first message of a stream.
pub fn head(method: &str, path: &str, headers: &[(&str, &str)], subset: Option<&[&str]>) -> ProcessingRequest {
    let mut all = vec![header(":method", method), header(":path", path), header(":authority", "gateway")];
    all.push(header("content-type", "application/json"));
    all.extend(headers.iter().map(|(key, value)| header(key, value)));
    let headers = HttpHeaders { headers: Some(HeaderMap { headers: all }), end_of_stream: method == "GET" };
    let list = |subset: &[&str]| ListValue { values: subset.iter().map(|endpoint| text(endpoint)).collect() };
    let hint = |subset| MetadataValue { kind: Some(Kind::ListValue(list(subset))) };
    let full = BodySendMode::FullDuplexStreamed.into();
    ProcessingRequest {
        metadata_context: subset
            .map(|subset| metadata("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset", hint(subset))),
        protocol_config: Some(ProtocolConfiguration { request_body_mode: full, response_body_mode: full }),
        ..message(Request::RequestHeaders(headers))
    }
}

pub fn message(request: Request) -> ProcessingRequest {
    ProcessingRequest { request: Some(request), ..ProcessingRequest::default() }
}

/// Returns the messages of a request's body, in chunks as a gateway reads them.
pub fn chunks(body: &[u8]) -> Vec<ProcessingRequest> {
    let count = body.chunks(16 << 10).count().max(1);
    let all = body.chunks(16 << 10).chain(body.is_empty().then_some(body));
    let chunk = |(at, chunk): (usize, &[u8])| HttpBody { body: chunk.to_vec().into(), end_of_stream: at + 1 == count };
    all.enumerate().map(|all| message(Request::RequestBody(chunk(all)))).collect()
}

impl Exchange {
    pub async fn send(&self, request: Request) -> Result<()> {
        Ok(self.messages.send(message(request)).await?)
    }

    pub async fn send_with(&self, request: Request, metadata: Metadata) -> Result<()> {
        Ok(self.messages.send(ProcessingRequest { metadata_context: Some(metadata), ..message(request) }).await?)
    }

    pub async fn next(&mut self) -> Result<Option<ProcessingResponse>, Status> {
        let next = timeout(LIMIT, self.answers.message()).await;
        next.unwrap_or_else(|_| Err(Status::deadline_exceeded("the picker has not answered")))
    }

    async fn expect(&mut self) -> Result<ProcessingResponse> {
        self.next().await?.context("the picker has closed the stream")
    }

    /// Reads the answer to the request's head and, unless the request is refused, all bytes of its body.
    pub async fn picked(&mut self) -> Result<Picked> {
        let ProcessingResponse { response, dynamic_metadata } = self.expect().await?;
        let endpoints = match response.context("the answer is empty")? {
            Response::ImmediateResponse(ImmediateResponse { status, headers, body, .. }) => {
                let all = headers.unwrap_or_default().set_headers.into_iter().filter_map(|set| set.header);
                let headers = all.map(|header| (header.key, String::from_utf8_lossy(&header.raw_value).into_owned())).collect();
                let status = status.context("a refusal has a status")?.code;
                return Ok(Picked::Refused { status, body: String::from_utf8(body.to_vec())?, headers });
            }
            Response::RequestHeaders(answer) => {
                let common = answer.response.context("the endpoint is missing")?;
                destination(common.header_mutation.context("the header is missing")?)?
            }
            other => bail!("{other:?} before the endpoint"),
        };
        let metadata = dynamic_metadata.context("the metadata is missing")?;
        let inner = metadata.fields.get("envoy.lb").and_then(|value| value.kind.clone());
        let Some(Kind::StructValue(inner)) = inner else { bail!("no metadata of envoy.lb: {metadata:?}") };
        let in_metadata = inner.fields.get(DESTINATION).and_then(|value| value.kind.clone());
        ensure!(in_metadata == Some(Kind::StringValue(endpoints.clone())), "the header and the metadata differ: {in_metadata:?}");
        Ok(Picked::Sent { endpoints, body: Vec::new() })
    }

    /// Reads the request's body up to its last piece or the trailers.
    pub async fn request_body(&mut self) -> Result<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            match self.expect().await?.response {
                Some(Response::RequestBody(answer)) => {
                    if piece(answer, &mut body)? {
                        return Ok(body);
                    }
                }
                Some(Response::RequestTrailers(_)) => return Ok(body),
                other => bail!("{other:?} in a request's body"),
            }
        }
    }

    /// Sends a request to the chosen server, and its answer through the picker, chunk by chunk. Returns the answer.
    pub async fn answer(&mut self, endpoint: &str, path: &str, body: Vec<u8>) -> Result<Value> {
        Ok(serde_json::from_slice(&self.raw_answer(endpoint, path, body).await?)?)
    }

    /// Like [`Exchange::answer`], for an answer that is not JSON.
    pub async fn raw_answer(&mut self, endpoint: &str, path: &str, body: Vec<u8>) -> Result<Vec<u8>> {
        let request = reqwest::Client::new().post(format!("http://{endpoint}{path}")).header("content-type", "application/json");
        let mut answer = request.body(body).timeout(LIMIT).send().await?;
        let status = answer.status().as_str().to_owned();
        self.response_head(&status, Metadata::default()).await?;
        let (mut given, mut back) = (Vec::new(), Vec::new());
        while let Some(chunk) = answer.chunk().await? {
            given.extend_from_slice(&chunk);
            back.extend(self.response_chunk(&chunk, false).await?);
        }
        back.extend(self.response_chunk(b"", true).await?);
        ensure!(given == back, "the picker has changed the answer");
        Ok(back)
    }

    pub async fn response_head(&mut self, status: &str, metadata: Metadata) -> Result<()> {
        self.response_headers(&[(":status", status)], metadata).await
    }

    pub async fn response_headers(&mut self, headers: &[(&str, &str)], metadata: Metadata) -> Result<()> {
        let headers = HeaderMap { headers: headers.iter().map(|(name, value)| header(name, value)).collect() };
        self.send_with(Request::ResponseHeaders(HttpHeaders { headers: Some(headers), end_of_stream: false }), metadata).await?;
        match self.expect().await?.response {
            Some(Response::ResponseHeaders(_)) => Ok(()),
            other => bail!("{other:?} for the answer's head"),
        }
    }

    /// Sends a chunk of the answer. Returns the bytes that the picker gives back for it.
    pub async fn response_chunk(&mut self, chunk: &[u8], ends: bool) -> Result<Vec<u8>> {
        self.send(Request::ResponseBody(HttpBody { body: chunk.to_vec().into(), end_of_stream: ends })).await?;
        let mut back = Vec::new();
        loop {
            match self.expect().await?.response {
                Some(Response::ResponseBody(answer)) => {
                    let ended = piece(answer, &mut back)?;
                    if back.len() >= chunk.len() && ended == ends {
                        return Ok(back);
                    }
                }
                other => bail!("{other:?} in the answer"),
            }
        }
    }

    pub async fn trailers(&mut self) -> Result<()> {
        self.send(Request::ResponseTrailers(HttpTrailers {})).await?;
        match self.expect().await?.response {
            Some(Response::ResponseTrailers(_)) => Ok(()),
            other => bail!("{other:?} for trailers"),
        }
    }
}

/// Appends a piece of a body. Returns whether it is the last one.
fn piece(answer: BodyResponse, body: &mut Vec<u8>) -> Result<bool> {
    let mutation = answer.response.and_then(|common| common.body_mutation).context("the body is missing")?;
    let streamed = mutation.streamed_response.context("the piece is missing")?;
    ensure!(streamed.body.len() <= PIECE_MAX, "a piece of {} bytes", streamed.body.len());
    body.extend_from_slice(&streamed.body);
    Ok(streamed.end_of_stream)
}

/// Returns the value of the header that names the endpoints. The gateway must replace what the client has sent in this header.
fn destination(mutation: HeaderMutation) -> Result<String> {
    let set = mutation.set_headers.into_iter().find(|set| set.header.as_ref().is_some_and(|header| header.key == DESTINATION));
    let set = set.context("the header is not set")?;
    ensure!(set.append_action == 2, "the header is not overwritten");
    Ok(String::from_utf8(set.header.context("the header is empty")?.raw_value.to_vec())?)
}
