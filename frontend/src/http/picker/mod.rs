//! An endpoint picker: serves Envoy's protocol for external processors, with which a gateway asks for each HTTP request which server is to
//! answer it (docs/gateway.md). The protocol is that of the Gateway API Inference Extension, proposal 004.
//!
//! One stream stands for one HTTP request (`exchange`). The request is placed like a frontend's, but on a worker that only observes its engine
//! (`choice`). The open stream is the booking. Prompts and answers pass through this process, and are never logged.

mod choice;
mod exchange;
mod usage;
mod wire;

use super::app::App;
use crate::error::ApiError;
use exchange::GatewayStream;
use futures::{StreamExt, stream, stream::BoxStream};
use std::sync::Arc;
use tandem_proto::{
    ext_proc::{
        ProcessingRequest, ProcessingResponse,
        external_processor_server::{ExternalProcessor, ExternalProcessorServer, SERVICE_NAME},
    },
    health::{
        HealthCheckRequest, HealthCheckResponse,
        health_check_response::ServingStatus,
        health_server::{Health, HealthServer},
    },
};
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming, service::Routes};

/// The maximum number of answers of one stream that wait to be sent, each of at most 62 KiB.
const ANSWERS_MAX: usize = 4;

/// The maximum number of open streams: eight for each sequence of the default of --max-concurrent-requests, as for a frontend's connections.
/// A placed request needs one of these sequences, so the others wait for bodies or placements.
const STREAMS_MAX: usize = 8_192;

/// The service of an endpoint picker. Cheap to clone.
#[derive(Clone)]
struct Picker {
    app: Arc<App>,
    streams: Arc<Semaphore>,
}

/// Returns the services for gateways. Gateways have no cluster key, so every caller is served.
pub(crate) fn routes(app: Arc<App>) -> Routes {
    let picker = Picker { app, streams: Arc::new(Semaphore::new(STREAMS_MAX)) };
    Routes::new(ExternalProcessorServer::new(picker.clone())).add_service(HealthServer::new(picker))
}

#[tonic::async_trait]
impl ExternalProcessor for Picker {
    type ProcessStream = BoxStream<'static, Result<ProcessingResponse, Status>>;

    async fn process(&self, request: Request<Streaming<ProcessingRequest>>) -> Result<Response<Self::ProcessStream>, Status> {
        let peer = request.remote_addr().map(|address| address.ip());
        let Ok(_permit) = Arc::clone(&self.streams).try_acquire_owned() else {
            return Ok(Response::new(stream::iter([Ok(wire::refusal(ApiError::Overloaded))]).boxed()));
        };
        let (answers, received) = mpsc::channel(ANSWERS_MAX);
        let exchange = GatewayStream { app: Arc::clone(&self.app), peer, messages: request.into_inner(), answers, _permit };
        // The exchange runs as a part of the stream, so it ends at once, with its booking, when the gateway resets the stream.
        let failure = stream::once(exchange.run()).filter_map(async |ended| ended.err().map(Err));
        Ok(Response::new(stream::select(ReceiverStream::new(received).map(Ok), failure).boxed()))
    }
}

#[tonic::async_trait]
impl Health for Picker {
    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        let status = match &*request.into_inner().service {
            "" | "liveness" => ServingStatus::Serving,
            "readiness" | SERVICE_NAME => match self.app.readiness().await.of_any() {
                Ok(()) => ServingStatus::Serving,
                Err(_) => ServingStatus::NotServing,
            },
            _ => return Err(Status::not_found("the health of liveness, readiness and of the external processor is known here")),
        };
        Ok(Response::new(HealthCheckResponse { status: status.into() }))
    }
}
