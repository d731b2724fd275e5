//! The messages of the protocol: what is read from a gateway's messages, and how answers are written.

use crate::{dispatch::DispatchError, error::ApiError};
use axum::{
    http::{HeaderName, HeaderValue, Method, Request, StatusCode, Uri, request::Parts},
    response::IntoResponse,
};
use bytes::Bytes;
use std::net::IpAddr;
use tandem_api::{Problem, RequestError, at_most};
use tandem_process::listen::PeerAddress;
use tandem_proto::ext_proc::{
    self, BodyMutation, BodyResponse, CommonResponse, HeaderMutation, HeaderValueOption, HeadersResponse, HttpStatus,
    ImmediateResponse, Metadata, ProcessingResponse, StreamedBodyResponse, Struct, Value, header_value_option::AppendAction,
    processing_response::Response, value::Kind,
};
use tonic::Status;

/// The header, and the key of the metadata, that name the chosen endpoints.
const DESTINATION: &str = "x-gateway-destination-endpoint";
/// The namespace of that metadata.
const NAMESPACE: &str = "envoy.lb";
/// The metadata with which a gateway limits the choice.
const SUBSET: (&str, &str) = ("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset");
/// The maximum number of endpoints in that metadata. A router looks each worker up in them.
const SUBSET_MAX: usize = 16_384;
/// No endpoint, at most an IPv6 address with a scope and a port, is longer.
const ENDPOINT_BYTES_MAX: usize = 64;
/// The key with which a gateway reports the endpoint that has answered.
const SERVED: &str = "x-gateway-destination-endpoint-served";

/// The maximum size of a piece of a body. Gateways expect at most 64 KiB, and the message has a few other bytes.
const PIECE_BYTES: usize = 62 << 10;

/// Returns the head of the HTTP request. Headers that HTTP does not allow are left out.
///
/// # Errors
/// The message has no method or no path. The inner error is that of a path which the client must not send.
pub(super) fn head(headers: Option<ext_proc::HeaderMap>, peer: Option<IpAddr>) -> Result<Result<Parts, ApiError>, Status> {
    let (mut parts, ()) = Request::new(()).into_parts();
    let (mut method, mut uri) = (None, None);
    for ext_proc::HeaderValue { key, value, raw_value } in headers.unwrap_or_default().headers {
        let value = if raw_value.is_empty() { Bytes::from(value) } else { raw_value };
        match &*key {
            ":method" => method = Method::from_bytes(&value).ok(),
            ":path" => uri = Some(Uri::from_maybe_shared(value)),
            _ => {
                if let (Ok(name), Ok(value)) = (key.parse::<HeaderName>(), HeaderValue::from_maybe_shared(value)) {
                    let added = parts.headers.try_append(name, value);
                    added.map_err(|_| Status::invalid_argument("the request has too many headers"))?;
                }
            }
        }
    }
    let (Some(method), Some(uri)) = (method, uri) else {
        return Err(Status::invalid_argument("the request's headers lack :method or :path"));
    };
    let Ok(uri) = uri else {
        let rule = "is empty, too long, or has characters that a URL may not have; percent-encode these";
        return Ok(Err(ApiError::invalid(":path", Problem::Rule { rule })));
    };
    (parts.method, parts.uri) = (method, uri);
    if let Some(address) = peer {
        parts.extensions.insert(PeerAddress(address));
    }
    Ok(Ok(parts))
}

fn find<'a>(metadata: Option<&'a Metadata>, namespace: &str, key: &str) -> Option<&'a Value> {
    metadata?.filter_metadata.get(namespace)?.fields.get(key)
}

/// Returns the endpoints to which the gateway limits the choice; `None` if it does not limit it. Texts that are too long for an endpoint are
/// left out, because no server has them.
///
/// # Errors
/// There are too many endpoints.
pub(super) fn subset(metadata: Option<&Metadata>) -> Result<Option<Vec<String>>, ApiError> {
    let Some(value) = find(metadata, SUBSET.0, SUBSET.1) else { return Ok(None) };
    let values = if let Some(Kind::ListValue(list)) = &value.kind { &list.values[..] } else { std::slice::from_ref(value) };
    let texts = values.iter().filter_map(|value| if let Some(Kind::StringValue(text)) = &value.kind { Some(text) } else { None });
    let endpoints = texts.flat_map(|text| text.split(',')).map(str::trim);
    let endpoints = endpoints.filter(|endpoint| (1..=ENDPOINT_BYTES_MAX).contains(&endpoint.len()));
    let endpoints: Vec<String> = endpoints.take(SUBSET_MAX + 1).map(str::to_owned).collect();
    at_most(SUBSET.1, endpoints.len(), SUBSET_MAX, "endpoints")?;
    Ok(Some(endpoints))
}

/// Returns the endpoint that has answered, as the gateway reports it.
pub(super) fn served(metadata: Option<&Metadata>) -> Option<&str> {
    if let Some(Kind::StringValue(text)) = &find(metadata, NAMESPACE, SERVED)?.kind { Some(text) } else { None }
}

fn header(key: &str, value: Bytes) -> HeaderValueOption {
    let header = ext_proc::HeaderValue { key: key.to_owned(), value: String::new(), raw_value: value };
    HeaderValueOption { header: Some(header), append_action: AppendAction::OverwriteIfExistsOrAdd.into() }
}

/// Returns the answer to the request's headers: the endpoints, `ip:port` separated by commas, as a header and as metadata.
pub(super) fn destination(endpoints: &str) -> ProcessingResponse {
    let mutation = HeaderMutation { set_headers: vec![header(DESTINATION, Bytes::from(endpoints.to_owned()))] };
    let common = CommonResponse { header_mutation: Some(mutation), clear_route_cache: true, ..Default::default() };
    let field = |key: &str, kind| Struct { fields: [(key.to_owned(), Value { kind: Some(kind) })].into() };
    let inner = field(DESTINATION, Kind::StringValue(endpoints.to_owned()));
    ProcessingResponse {
        response: Some(Response::RequestHeaders(HeadersResponse { response: Some(common) })),
        dynamic_metadata: Some(field(NAMESPACE, Kind::StructValue(inner))),
    }
}

/// Returns the answer with an error that the gateway sends to the client.
pub(super) fn refusal(error: ApiError) -> ProcessingResponse {
    let status = status(&error);
    let body = error.failure().body().to_string();
    let code = error.code().unwrap_or_default();
    let headers = error.into_response().headers().clone();
    let set_headers = headers.iter().map(|(name, value)| header(name.as_str(), Bytes::copy_from_slice(value.as_bytes())));
    let immediate = ImmediateResponse {
        status: Some(HttpStatus { code: status.as_u16().into() }),
        headers: Some(HeaderMutation { set_headers: set_headers.collect() }),
        body: body.into(),
        details: format!("tandem_{code}"),
    };
    answer(Response::ImmediateResponse(immediate))
}

/// Returns the status for the client. In this protocol, a request that is shed because of the load gets 429.
pub(super) fn status(error: &ApiError) -> StatusCode {
    match error {
        ApiError::Overloaded
        | ApiError::BodyBudget
        | ApiError::Request(RequestError::Busy)
        | ApiError::Dispatch(DispatchError::Overloaded { .. }) => StatusCode::TOO_MANY_REQUESTS,
        error => error.status(),
    }
}

pub(super) fn answer(response: Response) -> ProcessingResponse {
    ProcessingResponse { response: Some(response), dynamic_metadata: None }
}

/// What follows parts of a body.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    /// The end of the stream, which the last piece announces, even if the body is empty.
    End,
    /// More of the body, or trailers.
    More,
}

/// Returns the pieces in which these parts of a body are given back.
pub(super) fn pieces(parts: Vec<Bytes>, then: Then) -> impl Iterator<Item = BodyResponse> {
    let ends = then == Then::End;
    let split =
        |part: Bytes| (0..part.len()).step_by(PIECE_BYTES).map(move |at| part.slice(at..(at + PIECE_BYTES).min(part.len())));
    let mut all = parts.into_iter().flat_map(split).peekable();
    let mut last = (all.peek().is_none() && ends).then(Bytes::new);
    std::iter::from_fn(move || {
        let body = all.next().or_else(|| last.take())?;
        let streamed = StreamedBodyResponse { body, end_of_stream: ends && all.peek().is_none() };
        let mutation = BodyMutation { streamed_response: Some(streamed) };
        Some(BodyResponse { response: Some(CommonResponse { body_mutation: Some(mutation), ..Default::default() }) })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_proto::ext_proc::ListValue;

    fn sizes(parts: &[usize], then: Then) -> Vec<(usize, bool)> {
        let parts = parts.iter().map(|bytes| Bytes::from(vec![0; *bytes])).collect();
        let streamed = |piece: BodyResponse| piece.response?.body_mutation?.streamed_response;
        let size = |piece: StreamedBodyResponse| (piece.body.len(), piece.end_of_stream);
        pieces(parts, then).map(|piece| streamed(piece).map_or((0, false), size)).collect()
    }

    #[test]
    fn only_the_last_piece_of_a_body_ends_the_stream() {
        assert_eq!(sizes(&[PIECE_BYTES + 1, 2], Then::End), [(PIECE_BYTES, false), (1, false), (2, true)]);
        assert_eq!(sizes(&[2 * PIECE_BYTES], Then::More), [(PIECE_BYTES, false), (PIECE_BYTES, false)]);
        assert_eq!(sizes(&[], Then::End), [(0, true)]);
        assert_eq!(sizes(&[0], Then::End), [(0, true)]);
        assert_eq!(sizes(&[], Then::More), []);
    }

    #[test]
    fn subset_is_a_list_or_a_text_and_limits_the_choice_whatever_it_is() {
        let metadata = |kind| {
            let fields = Struct { fields: [(SUBSET.1.to_owned(), Value { kind })].into() };
            Metadata { filter_metadata: [(SUBSET.0.to_owned(), fields)].into() }
        };
        let text = |text: &str| Kind::StringValue(text.to_owned());
        let list =
            |all: &[&str]| Kind::ListValue(ListValue { values: all.iter().map(|one| Value { kind: Some(text(one)) }).collect() });
        let long = format!("b:2,{}", "9".repeat(ENDPOINT_BYTES_MAX + 1));
        let most = vec!["a:1"; SUBSET_MAX];
        for (kind, expected) in [
            (Some(text("a:1, b:2")), &["a:1", "b:2"][..]),
            (Some(list(&["a:1", "b:2,c:3"])), &["a:1", "b:2", "c:3"]),
            (Some(list(&["a:1", &long])), &["a:1", "b:2"]),
            (Some(text(&long[4..])), &[]),
            (Some(text(&most.join(","))), &most),
            (Some(list(&[])), &[]),
            (Some(Kind::StructValue(Struct::default())), &[]),
            (None, &[]),
        ] {
            let found = subset(Some(&metadata(kind))).expect("the list is short");
            assert_eq!(found.as_deref(), Some(&*expected.iter().map(|&one| one.to_owned()).collect::<Vec<_>>()));
        }
        for kind in [text(&[&most[..], &["b:2"]].concat().join(",")), list(&[&most[..], &["b:2"]].concat())] {
            let refused = subset(Some(&metadata(Some(kind)))).expect_err("the list is too long");
            assert!(
                refused.status() == StatusCode::BAD_REQUEST && refused.to_string().contains("at most 16384 endpoints"),
                "{refused}"
            );
        }
        assert!(matches!((subset(Some(&Metadata::default())), subset(None)), (Ok(None), Ok(None))));
    }
}
