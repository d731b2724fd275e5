//! The least that any endpoint picker does: it names one endpoint for all requests, and gives back every part of a body as it came. What it costs
//! is what the protocol costs, in the gateway and outside it.

use crate::rig::DESTINATION;
use anyhow::Result;
use futures::{StreamExt, stream::BoxStream};
use tandem_proto::ext_proc::{
    BodyMutation, BodyResponse, CommonResponse, HeaderMutation, HeaderValue, HeaderValueOption, HeadersResponse, HttpBody,
    ProcessingRequest, ProcessingResponse, StreamedBodyResponse, TrailersResponse,
    external_processor_server::{ExternalProcessor, ExternalProcessorServer},
    header_value_option::AppendAction,
    processing_request::Request as Asked,
    processing_response::Response as Answer,
};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, Streaming, transport::Server};

/// A picker whose endpoint is always this one.
struct OneEndpoint(String);

/// Starts the picker and returns its port.
#[expect(clippy::disallowed_methods, reason = "the task ends with the test's runtime")]
pub async fn start(endpoint: String) -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    let server = Server::builder().add_service(ExternalProcessorServer::new(OneEndpoint(endpoint)));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    Ok(port)
}

fn given_back(body: HttpBody) -> BodyResponse {
    let streamed = StreamedBodyResponse { body: body.body, end_of_stream: body.end_of_stream };
    let mutation = BodyMutation { streamed_response: Some(streamed) };
    BodyResponse { response: Some(CommonResponse { body_mutation: Some(mutation), ..Default::default() }) }
}

fn answer(asked: Asked, endpoint: &str) -> Answer {
    match asked {
        Asked::RequestHeaders(_) => {
            let header = HeaderValue { key: DESTINATION.to_owned(), raw_value: endpoint.to_owned().into(), ..Default::default() };
            let header = HeaderValueOption { header: Some(header), append_action: AppendAction::OverwriteIfExistsOrAdd.into() };
            let mutation = HeaderMutation { set_headers: vec![header] };
            let common = CommonResponse { header_mutation: Some(mutation), clear_route_cache: true, ..Default::default() };
            Answer::RequestHeaders(HeadersResponse { response: Some(common) })
        }
        Asked::RequestBody(body) => Answer::RequestBody(given_back(body)),
        Asked::RequestTrailers(_) => Answer::RequestTrailers(TrailersResponse {}),
        Asked::ResponseHeaders(_) => Answer::ResponseHeaders(HeadersResponse { response: Some(CommonResponse::default()) }),
        Asked::ResponseBody(body) => Answer::ResponseBody(given_back(body)),
        Asked::ResponseTrailers(_) => Answer::ResponseTrailers(TrailersResponse {}),
    }
}

#[tonic::async_trait]
impl ExternalProcessor for OneEndpoint {
    type ProcessStream = BoxStream<'static, Result<ProcessingResponse, Status>>;

    async fn process(&self, request: Request<Streaming<ProcessingRequest>>) -> Result<Response<Self::ProcessStream>, Status> {
        let endpoint = self.0.clone();
        let answers = request.into_inner().filter_map(move |asked| {
            let answer = |asked: ProcessingRequest| {
                let response = Some(answer(asked.request?, &endpoint));
                Some(ProcessingResponse { response, dynamic_metadata: None })
            };
            let response = asked.map(answer).transpose();
            async move { response }
        });
        Ok(Response::new(answers.boxed()))
    }
}
