//! HTTP requests from the command line.

use std::time::Duration;
use ureq::{
    Agent, Body, RequestBuilder,
    http::Response,
    tls::{Certificate, RootCerts, TlsConfig},
};

/// Time limit for a complete reply to a request for which no text is generated.
pub(crate) const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for a connection. A server on another continent answers within a second.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A reply to an HTTP request, with any status.
pub(crate) struct HttpReply {
    pub(crate) status: u16,
    pub(crate) body: String,
}

/// Sends a GET to a process at this `host:port`.
pub(crate) fn get(address: &str, timeout: Duration, path: &str) -> Result<HttpReply, ureq::Error> {
    read(agent(Some(timeout), &[]).get(format!("http://{address}{path}")).call()?)
}

/// Returns an agent with this limit on the time of a whole reply. `ca` has the certificates that may sign a server's certificate; if it is
/// empty, the public authorities may.
pub(crate) fn agent(timeout: Option<Duration>, ca: &[Certificate<'static>]) -> Agent {
    let mut tls = TlsConfig::builder();
    if !ca.is_empty() {
        tls = tls.root_certs(RootCerts::new_with_certs(ca));
    }
    let config = Agent::config_builder().timeout_global(timeout).http_status_as_error(false).proxy(None);
    config.timeout_connect(Some(CONNECT_TIMEOUT)).tls_config(tls.build()).build().into()
}

pub(crate) fn with_key<B>(request: RequestBuilder<B>, key: Option<&str>) -> RequestBuilder<B> {
    match key {
        Some(key) => request.header("authorization", format!("Bearer {key}")),
        None => request,
    }
}

pub(crate) fn read(mut reply: Response<Body>) -> Result<HttpReply, ureq::Error> {
    Ok(HttpReply { status: reply.status().as_u16(), body: reply.body_mut().read_to_string()? })
}
