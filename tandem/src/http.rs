//! HTTP requests from the command line to processes of a cluster, and to other servers with OpenAI's API.

use std::time::Duration;

/// Time limit for a whole reply. Processes answer these requests without generating text.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit for a connection. A server on another continent answers within a second.
#[cfg(feature = "chat")]
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The environment variable with the API key, unless the user names another one.
pub(crate) const KEY_VARIABLE: &str = "TANDEM_API_KEY";

/// A reply to an HTTP request, with any status.
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) body: String,
}

/// Sends a GET to `host:port`.
pub(crate) fn get(address: &str, path: &str) -> Result<Reply, ureq::Error> {
    get_with_key(&format!("http://{address}{path}"), None)
}

/// Sends a GET to a URL, with an API key if there is one.
pub(crate) fn get_with_key(url: &str, key: Option<&str>) -> Result<Reply, ureq::Error> {
    read(with_key(agent().get(url), key).call()?)
}

/// Sends a POST with a body of JSON and one additional header to `host:port`, with an API key if there is one.
pub(crate) fn post(address: &str, path: &str, header: (&str, &str), key: Option<&str>, body: &str) -> Result<Reply, ureq::Error> {
    let request = with_key(agent().post(format!("http://{address}{path}")), key);
    read(request.content_type("application/json").header(header.0, header.1).send(body)?)
}

/// Returns the API key in the environment variable with this name, if it has one.
pub(crate) fn key_in(variable: &str) -> Option<String> {
    std::env::var(variable).ok().filter(|key| !key.is_empty())
}

fn with_key<B>(request: ureq::RequestBuilder<B>, key: Option<&str>) -> ureq::RequestBuilder<B> {
    match key {
        Some(key) => request.header("authorization", format!("Bearer {key}")),
        None => request,
    }
}

fn agent() -> ureq::Agent {
    let config = ureq::Agent::config_builder().timeout_global(Some(REPLY_TIMEOUT)).http_status_as_error(false).proxy(None);
    config.build().into()
}

/// A server with OpenAI's API.
#[cfg(feature = "chat")]
pub(crate) struct Server {
    /// The URL to which paths such as `/v1/models` are appended.
    pub(crate) base_url: String,
    pub(crate) key: Option<String>,
    /// The certificates that may sign the server's certificate; empty: those of the public authorities.
    pub(crate) ca: Vec<ureq::tls::Certificate<'static>>,
}

#[cfg(feature = "chat")]
impl Server {
    /// Sends a GET.
    pub(crate) fn get(&self, path: &str) -> Result<Reply, ureq::Error> {
        let request = self.agent(Some(REPLY_TIMEOUT)).get(format!("{}{path}", self.base_url));
        read(with_key(request, self.key.as_deref()).call()?)
    }

    /// Sends a POST with a body of JSON. Returns the reply, of which the body is still to be read, without a time limit.
    pub(crate) fn stream(&self, path: &str, body: &str) -> Result<ureq::http::Response<ureq::Body>, ureq::Error> {
        let request = self.agent(None).post(format!("{}{path}", self.base_url));
        with_key(request, self.key.as_deref()).content_type("application/json").send(body)
    }

    fn agent(&self, timeout: Option<Duration>) -> ureq::Agent {
        use ureq::tls::{RootCerts, TlsConfig};
        let mut tls = TlsConfig::builder();
        if !self.ca.is_empty() {
            tls = tls.root_certs(RootCerts::new_with_certs(&self.ca));
        }
        let config = ureq::Agent::config_builder().timeout_global(timeout).http_status_as_error(false).proxy(None);
        config.timeout_connect(Some(CONNECT_TIMEOUT)).tls_config(tls.build()).build().into()
    }
}

fn read(mut reply: ureq::http::Response<ureq::Body>) -> Result<Reply, ureq::Error> {
    Ok(Reply { status: reply.status().as_u16(), body: reply.body_mut().read_to_string()? })
}
