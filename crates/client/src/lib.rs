//! An HTTP/1.1 client of one server, with TLS. It bounds the size of each answer, and of each event in a stream of server-sent events.

mod events;

use bytes::Bytes;
use events::EventReader;
use futures::{Stream, StreamExt, stream};
use http_body_util::{BodyExt, BodyStream, Full, Limited};
use hyper::{HeaderMap, Method, Request, Response, Uri, body::Incoming};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};
use std::{error::Error, future::ready, sync::Arc, time::Duration};

/// The time after which an idle connection is closed. Servers close idle connections later (uvicorn: after 5 s), so no request is sent on a
/// connection that the server is closing.
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);

/// The reason why a request has no complete answer.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The server cannot be reached, or the connection was lost before the answer began.
    #[error("the request received no response")]
    Request(#[from] hyper_util::client::legacy::Error),
    /// The connection was lost before the answer was complete.
    #[error("the connection was closed in the middle of the response")]
    Body(#[from] hyper::Error),
    /// The answer, or one of its events, is longer than this number of bytes.
    #[error("the response is longer than {0} bytes, which is the limit")]
    TooLong(usize),
    /// The server did not answer within this time.
    #[error("no response within {0:?}")]
    Timeout(Duration),
    /// The answer contains data that is not a server-sent event.
    #[error("the response has an event that cannot be read: {0}")]
    Event(String),
}

impl HttpError {
    /// Returns whether the request cannot have crashed the server: it has not reached the server, or the server keeps sending data that is no valid
    /// answer.
    pub fn cannot_have_ended_the_server(&self) -> bool {
        match self {
            Self::Request(error) => {
                let reason = error.source().and_then(|source| source.downcast_ref::<hyper::Error>());
                error.is_connect() || reason.is_some_and(hyper::Error::is_parse)
            }
            Self::TooLong(_) | Self::Event(_) => true,
            Self::Body(_) | Self::Timeout(_) => false,
        }
    }
}

/// The address of a server is not a URL with `http` or `https`, a host and no query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an http:// or https:// URL with a host and without a query")]
pub struct InvalidUrl;

/// A client of one server. It is cheap to clone.
#[derive(Clone, Debug)]
pub struct HttpClient {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    /// The beginning of every URL: the scheme, the authority and a path prefix without a slash at its end.
    base: Arc<str>,
    host: Arc<str>,
}

impl HttpClient {
    /// Makes a client of the server at `url`, whose certificate one of the authorities has signed.
    ///
    /// # Errors
    /// Fails if the URL cannot be used.
    pub fn new(url: &str, authorities: RootCertStore, connect_timeout: Duration) -> Result<Self, InvalidUrl> {
        let uri: Uri = url.parse().map_err(|_| InvalidUrl)?;
        let host = uri.host().filter(|host| !host.is_empty() && uri.query().is_none());
        let host = host.filter(|_| matches!(uri.scheme_str(), Some("http" | "https"))).ok_or(InvalidUrl)?.into();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let tls = tls.expect("ring has the default protocols").with_root_certificates(authorities).with_no_client_auth();
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(connect_timeout));
        let connector =
            HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1().wrap_connector(connector);
        let client =
            Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).pool_idle_timeout(IDLE_TIMEOUT).build(connector);
        Ok(Self { client, base: url.trim_end_matches('/').into(), host })
    }

    /// The server's address, without a slash at its end.
    pub fn url(&self) -> &str {
        &self.base
    }

    /// The host of the server's address.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Sends a request. Returns the answer when its head has arrived. `path` is a path of a URI, which may have a query, and follows the
    /// address.
    ///
    /// # Errors
    /// Fails if the server cannot be reached, or if the connection is lost.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<Response<Incoming>, HttpError> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = format!("{}{path}", self.base).parse().expect("a checked address and a path are a URI");
        *request.headers_mut() = headers;
        Ok(self.client.request(request).await?)
    }
}

/// Returns the public authorities, and those whose certificates `pem` has.
///
/// # Errors
/// Returns a message that says what is wrong with the certificates.
pub fn authorities(pem: Option<&[u8]>) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.into() };
    for certificate in CertificateDer::pem_slice_iter(pem.unwrap_or_default()) {
        let certificate = certificate.map_err(|error| error.to_string())?;
        roots.add(certificate).map_err(|error| error.to_string())?;
    }
    Ok(roots)
}

/// Returns the body of an answer, which may have at most `max` bytes.
///
/// # Errors
/// Fails if the body is longer, or if the connection is lost.
pub async fn whole(answer: Response<Incoming>, max: usize) -> Result<Bytes, HttpError> {
    match Limited::new(answer.into_body(), max).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) => Err(error.downcast::<hyper::Error>().map_or(HttpError::TooLong(max), |error| HttpError::Body(*error))),
    }
}

/// Returns the data of an answer's server-sent events as they arrive. An event has at most `max` bytes. Dropping the stream closes the connection.
pub fn events(answer: Response<Incoming>, max: usize) -> impl Stream<Item = Result<String, HttpError>> + Send {
    let pieces = BodyStream::new(answer.into_body())
        .filter_map(|frame| ready(frame.map_err(HttpError::from).map(|frame| frame.into_data().ok()).transpose()));
    events_of(pieces, max)
}

/// Returns the data of the server-sent events in the chunks of a body. Each event may have at most `max` bytes.
pub fn events_of<B: AsRef<[u8]> + Send>(
    pieces: impl Stream<Item = Result<B, HttpError>> + Send,
    max: usize,
) -> impl Stream<Item = Result<String, HttpError>> + Send {
    let mut reader = EventReader::new(max);
    let events = pieces.map(move |piece| piece.map_or_else(|error| vec![Err(error)], |piece| reader.read(piece.as_ref())));
    events.flat_map(stream::iter)
}
