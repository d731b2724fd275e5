//! HTTP requests from the command line to processes of a cluster.

use std::time::Duration;

/// Time limit for a whole reply. Processes answer these requests without generating text.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// A reply with any status.
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) body: String,
}

/// Sends a GET to `host:port`.
pub(crate) fn get(address: &str, path: &str) -> Result<Reply, ureq::Error> {
    read(agent().get(format!("http://{address}{path}")).call()?)
}

/// Sends a POST with a body of JSON and one additional header to `host:port`.
pub(crate) fn post(address: &str, path: &str, header: (&str, &str), body: &str) -> Result<Reply, ureq::Error> {
    let request = agent().post(format!("http://{address}{path}"));
    read(request.content_type("application/json").header(header.0, header.1).send(body)?)
}

fn agent() -> ureq::Agent {
    let config = ureq::Agent::config_builder().timeout_global(Some(REPLY_TIMEOUT)).http_status_as_error(false).proxy(None);
    config.build().into()
}

fn read(mut reply: ureq::http::Response<ureq::Body>) -> Result<Reply, ureq::Error> {
    Ok(Reply { status: reply.status().as_u16(), body: reply.body_mut().read_to_string()? })
}
