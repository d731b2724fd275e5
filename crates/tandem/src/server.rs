//! The servers that commands connect to: how they are named, requests to them, and what answers at an address.

use crate::{
    http::{self, HttpReply, REPLY_TIMEOUT, read, with_key},
    running::{self, RunningCluster},
    serve::printable,
};
use anyhow::{Context, Error, Result, anyhow, ensure};
use std::{
    fmt, fs,
    io::{ErrorKind, Read, Write},
    net::{TcpStream, ToSocketAddrs, UdpSocket},
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};
use tandem_process::telemetry::tell;
use ureq::{
    Body,
    http::Response,
    tls::{Certificate, PemItem, parse_pem},
};

/// The environment variable with the API key, unless the user names another one.
pub(crate) const KEY_VARIABLE: &str = "TANDEM_API_KEY";

/// A server, as all commands take it: a port of this machine, `host:port`, or a URL. A URL may have the path of an API, with or without `/v1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerAddress {
    /// The URL to which paths such as `/v1/models` are appended.
    base_url: String,
}

impl FromStr for ServerAddress {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const ADVICE: &str = "write a port, host:port, or a URL that begins with http:// or https://";
        let url = match text.split_once("://") {
            Some((scheme, rest)) if ["http", "https"].contains(&scheme) && !rest.is_empty() => text.to_owned(),
            Some(_) => return Err(ADVICE),
            None => format!("http://{}", crate::settings::address(text).map_err(|_| ADVICE)?),
        };
        let url = url.trim_end_matches('/');
        Ok(Self { base_url: url.strip_suffix("/v1").unwrap_or(url).to_owned() })
    }
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.base_url.strip_prefix("http://").unwrap_or(&self.base_url))
    }
}

impl ServerAddress {
    /// Returns the URL, without `/v1`.
    #[cfg(feature = "load")]
    pub(crate) fn url(&self) -> &str {
        &self.base_url
    }

    /// Returns `host:port`.
    pub(crate) fn host_port(&self) -> String {
        let (scheme, rest) = self.base_url.split_once("://").unwrap_or(("http", &self.base_url));
        let authority = rest.split('/').next().unwrap_or_default();
        let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        if has_port { authority.to_owned() } else { format!("{authority}:{}", if scheme == "https" { 443 } else { 80 }) }
    }
}

/// The server of a command.
#[derive(clap::Args, Clone, Debug)]
pub struct ServerArgs {
    /// The server: a port of this machine, host:port, or a URL [default: the `tandem up` that you run, or else 127.0.0.1:8000]
    #[arg(value_name = "SERVER", env = "TANDEM_FRONTEND")]
    pub server: Option<ServerAddress>,
    /// File with the certificate of the server or of its authority, in PEM format [default: the public authorities]
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
}

impl ServerArgs {
    /// Returns the server, with the API key in the environment variable `key_env` if it has one. `command` is the command that needs it.
    ///
    /// # Errors
    /// No server is named and several clusters run, or the file of `--ca` has no certificate.
    pub(crate) fn open(&self, command: &str, key_env: Option<&str>) -> Result<HttpServer> {
        let key = key_env.and_then(|name| std::env::var(name).ok()).filter(|key| !key.is_empty());
        Ok(HttpServer { key, ..HttpServer::at(self.place(command)?)? })
    }

    /// Returns where the server is: as named, or the only running cluster of this user, or the default.
    ///
    /// # Errors
    /// No server is named and several clusters run.
    pub(crate) fn place(&self, command: &str) -> Result<ServerPlace> {
        let named = |address: &ServerAddress| ServerPlace {
            address: address.clone(),
            ca: self.ca.clone(),
            is_default: false,
            draining: false,
        };
        if let Some(address) = &self.server {
            return Ok(named(address));
        }
        match RunningCluster::only(&running::folders(), command)? {
            Some(cluster) => {
                let place = ServerPlace::of(&cluster)?;
                Ok(ServerPlace { ca: self.ca.clone().or(place.ca), ..place })
            }
            None => {
                let address = "127.0.0.1:8000".parse().expect("the address is valid");
                Ok(ServerPlace { is_default: true, ..named(&address) })
            }
        }
    }
}

/// The server to which a command connects.
pub(crate) struct ServerPlace {
    pub(crate) address: ServerAddress,
    /// The file with the certificates that may sign the server's certificate; `None` if only the public authorities may.
    pub(crate) ca: Option<PathBuf>,
    /// Whether the user has named no server and runs no cluster.
    is_default: bool,
    /// Whether the user has named no server, and runs a cluster that drains.
    draining: bool,
}

impl ServerPlace {
    /// Returns where the frontend of a running cluster is.
    ///
    /// # Errors
    /// The URL of the frontend cannot be used.
    pub(crate) fn of(cluster: &RunningCluster) -> Result<Self> {
        let url = &cluster.frontend;
        let address = url.parse().map_err(|_| anyhow!("`tandem up` has the URL {url}, which cannot be used"))?;
        Ok(Self { address, ca: cluster.ca.clone(), is_default: false, draining: cluster.draining })
    }

    /// Returns the content of the file of `--ca`, if there is one.
    ///
    /// # Errors
    /// The file cannot be read.
    #[cfg(feature = "load")]
    pub(crate) fn authority(&self) -> Result<Option<Vec<u8>>> {
        let read = |path: &PathBuf| fs::read(path).with_context(|| format!("--ca {} cannot be read", path.display()));
        self.ca.as_ref().map(read).transpose()
    }

    /// Fails with advice if nothing answers at the address, or if the port does not answer.
    #[cfg(feature = "load")]
    pub(crate) fn check(&self) -> Result<()> {
        let kind = kind(&self.address);
        ensure!(kind != Some(SILENT), "{} is {SILENT}", self.address);
        let is_wrong = |kind: &str| match kind {
            TLS => !self.address.base_url.starts_with("https://"),
            kind => kind == GRPC || PLAIN_ADMIN.contains(&kind) || without_tls(&self.address, kind).is_some(),
        };
        if kind.is_some_and(is_wrong) {
            const WANTED: &str = "this command needs a frontend, or another server with OpenAI's API";
            return Err(wrong_kind(&self.address, WANTED).unwrap_or_else(|| anyhow!("{} does not answer", self.address)));
        }
        ensure!(!self.is_default || kind.is_some(), nothing_runs("server", &self.address));
        ensure!(kind.is_some(), "no server answers at {}; start it, or correct SERVER", self.address);
        Ok(())
    }
}

/// Returns the running cluster whose frontend or router is at this address; `None` if there is none.
pub(crate) fn running_at(folders: &[PathBuf], address: &ServerAddress) -> Option<RunningCluster> {
    // Treats localhost and 127.0.0.1 as equal, because the certificate of a frontend may have only one of these names.
    let place = |address: &ServerAddress| address.host_port().replace("localhost:", "127.0.0.1:");
    let named = place(address);
    let port = |place: &str| place.rsplit_once(':').map(|(_, port)| port.to_owned());
    let is_named = |cluster: &RunningCluster| {
        let frontend = ServerPlace::of(cluster).map(|frontend| place(&frontend.address)).unwrap_or_default();
        let has_port = cluster.on_all_addresses && port(&frontend) == port(&named);
        cluster.router.to_string() == named || frontend == named || has_port && is_of_this_host(&named)
    };
    RunningCluster::all(folders).ok()?.into_iter().find(is_named)
}

/// Returns whether `host:port` names an address of this host: only at such an address can a socket listen.
fn is_of_this_host(host_port: &str) -> bool {
    host_port.to_socket_addrs().is_ok_and(|mut found| found.any(|at| UdpSocket::bind((at.ip(), 0)).is_ok()))
}

pub(crate) struct HttpServer {
    pub(crate) address: ServerAddress,
    key: Option<String>,
    /// The certificates that may sign the server's certificate; empty if only the public authorities may.
    ca: Vec<Certificate<'static>>,
    /// Whether the user has named no server and runs no cluster.
    is_default: bool,
    /// Whether the user has named no server, and runs a cluster that drains.
    draining: bool,
}

impl HttpServer {
    /// Creates a server without a key, whose certificate a public authority has signed.
    pub(crate) fn new(address: ServerAddress) -> Self {
        Self { address, key: None, ca: Vec::new(), is_default: false, draining: false }
    }

    /// Returns a server without a key, whose certificate the public authorities or those in the file may have signed.
    ///
    /// # Errors
    /// The file cannot be read, or has no certificate.
    pub(crate) fn trusting(address: ServerAddress, ca: Option<&Path>) -> Result<Self> {
        Ok(Self { ca: ca.map_or_else(|| Ok(Vec::new()), certificates)?, ..Self::new(address) })
    }

    /// Returns the server at this place, without a key.
    ///
    /// # Errors
    /// The file of `--ca` cannot be read, or has no certificate.
    pub(crate) fn at(ServerPlace { address, ca, is_default, draining }: ServerPlace) -> Result<Self> {
        let ca = ca.as_deref().map_or_else(|| Ok(Vec::new()), certificates)?;
        Ok(Self { address, key: None, ca, is_default, draining })
    }

    /// Sends a GET once, even if the server is still starting.
    pub(crate) fn get_now(&self, path: &str) -> Result<HttpReply, ureq::Error> {
        let request = http::agent(Some(REPLY_TIMEOUT), &self.ca).get(self.url(path));
        read(with_key(request, self.key.as_deref()).call()?)
    }

    /// Sends a GET. While the server starts, waits for it.
    pub(crate) fn get(&self, path: &str) -> Result<HttpReply, ureq::Error> {
        read(started(|| {
            let request = http::agent(Some(REPLY_TIMEOUT), &self.ca).get(self.url(path));
            with_key(request, self.key.as_deref()).call()
        })?)
    }

    /// Sends a POST with a body of JSON and one additional header. While the server starts, waits for it.
    pub(crate) fn post(&self, path: &str, header: (&str, &str), body: &str) -> Result<HttpReply, ureq::Error> {
        read(started(|| {
            let request = with_key(http::agent(Some(REPLY_TIMEOUT), &self.ca).post(self.url(path)), self.key.as_deref());
            request.content_type("application/json").header(header.0, header.1).send(body)
        })?)
    }

    /// Sends a POST with a body of JSON, without a time limit. Returns the reply when its head has arrived; the caller reads the body. While the
    /// server starts, waits for it.
    #[cfg(feature = "chat")]
    pub(crate) fn stream(&self, path: &str, body: &str) -> Result<Response<Body>, ureq::Error> {
        started(|| {
            let request = with_key(http::agent(None, &self.ca).post(self.url(path)), self.key.as_deref());
            request.content_type("application/json").send(body)
        })
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.address.base_url)
    }

    /// Returns the error for a server that gives no reply. It says what answers at the address, or how to start a server. `wanted` says which
    /// server the command needs.
    pub(crate) fn no_reply(&self, error: ureq::Error, wanted: &str) -> Error {
        if error.to_string().contains("certificate") {
            let advice = "is not trusted; give this certificate, or its authority's, with --ca FILE";
            return Error::new(error).context(format!("the certificate of the server at {} {advice}", self.address));
        }
        match wrong_kind(&self.address, wanted) {
            Some(wrong) => wrong,
            None if self.draining => Error::new(error).context(format!(
                "the `tandem up` at {} shuts down: it finishes the requests that it has, and accepts no others",
                self.address
            )),
            None if self.is_default => Error::new(error).context(nothing_runs("server", &self.address)),
            None => Error::new(error).context(format!("no server answers at {}; {wanted}", self.address)),
        }
    }
}

/// What the operator of a frontend does whose details are not shown to the command.
pub(crate) const TRUST_ADVICE: &str =
    "start it with --trusted-proxies ADDRESS, the address that you ask it from, or with --expose-details always";

/// Returns the message for a command without a server, if its user runs no cluster and nothing answers at the default address either.
pub(crate) fn nothing_runs(what: &str, default: &ServerAddress) -> String {
    format!("you run no `tandem up`, and no {what} answers at {default}; start `tandem up`, or name the address of a {what}")
}

/// The header of a reply in which a starting server says what it does.
const STARTING: &str = "x-tandem-starting";
/// The pause before a request to a starting server is sent again.
const STARTING_PAUSE: Duration = Duration::from_secs(1);

/// Sends a request again until the server has started. Meanwhile prints on stderr what the server does, whenever that changes.
fn started(send: impl Fn() -> Result<Response<Body>, ureq::Error>) -> Result<Response<Body>, ureq::Error> {
    let mut printed = String::new();
    loop {
        let reply = send()?;
        let Some(step) = reply.headers().get(STARTING) else { return Ok(reply) };
        let step = printable(step.to_str().unwrap_or_default());
        if printed != step {
            tell(std::io::stderr(), &format!("the server is starting: {step}\n"));
            printed = step;
        }
        std::thread::sleep(STARTING_PAUSE);
    }
}

/// Returns the certificates in a file.
fn certificates(path: &Path) -> Result<Vec<Certificate<'static>>> {
    let pem = fs::read(path).with_context(|| format!("--ca {} cannot be read", path.display()))?;
    let items = parse_pem(&pem).filter_map(|item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(Ok(certificate)),
        Ok(_) => None,
        Err(error) => Some(Err(error)),
    });
    let found: Vec<_> =
        items.collect::<Result<_, _>>().with_context(|| format!("--ca {} is not in PEM format", path.display()))?;
    ensure!(!found.is_empty(), "--ca {} has no certificate in PEM format", path.display());
    Ok(found)
}

/// Returns the error for a server of another kind than the command needs; `None` if nothing answers at the address.
pub(crate) fn wrong_kind(address: &ServerAddress, wanted: &str) -> Option<Error> {
    let kind = kind(address)?;
    if let Some(wrong) = without_tls(address, kind) {
        return Some(wrong);
    }
    let (scheme, rest) = address.base_url.split_once("://").unwrap_or_default();
    Some(match rest.split_once('/') {
        Some((authority, path)) if kind == FRONTEND => {
            anyhow!("/{path} is no path of the frontend at {authority}; write {scheme}://{authority}")
        }
        _ if kind == FRONTEND_ADMIN => anyhow!("{address} is {kind}; write the port of a frontend's --listen"),
        _ => anyhow!("{address} is {kind}; {wanted}"),
    })
}

/// Returns the error for an `https://` URL of a port at which this kind of server answers without TLS; `None` if that is no mistake. Other
/// programs may answer HTTP at a port with TLS.
fn without_tls(address: &ServerAddress, kind: &str) -> Option<Error> {
    let rest = address.base_url.strip_prefix("https://")?;
    let is_plain = kind == FRONTEND || PLAIN_ADMIN.contains(&kind);
    is_plain.then(|| anyhow!("{address} is {kind} without TLS; write http://{rest}"))
}

/// What answers at the port of a frontend.
pub(crate) const FRONTEND: &str = "a frontend";

/// What answers at the port of a frontend's `--admin-listen`.
pub(crate) const FRONTEND_ADMIN: &str = "the admin port of a frontend or an endpoint picker";

/// What answers at the `--admin-listen` of a router.
const ROUTER_ADMIN: &str = "the admin port of a router";

/// What answers at the `--admin-listen` of a worker.
const WORKER_ADMIN: &str = "the admin port of a worker";

/// The admin ports of all processes, which never have TLS.
const PLAIN_ADMIN: [&str; 3] = [FRONTEND_ADMIN, ROUTER_ADMIN, WORKER_ADMIN];

/// What answers at the gRPC port of a process.
pub(crate) const GRPC: &str = "the gRPC port of a router, a worker or an endpoint picker";

/// What answers at a port that requires TLS.
pub(crate) const TLS: &str = "a port with TLS: https:// of a frontend, or the gRPC port of a process with a certificate";

/// Time limit for the answer of a server whose protocol is not known.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// Returns what answers at an address; `None` if nothing does.
pub(crate) fn kind(address: &ServerAddress) -> Option<&'static str> {
    let at = address.host_port();
    let Ok(metrics) = http::get(&at, PROBE_TIMEOUT, "/metrics") else { return protocol(&at) };
    let has = |family: &str| metrics.status == 200 && metrics.body.contains(family);
    // `tandem up` has the metrics of all roles, so the frontend's are looked for first.
    let families = [("tandem_frontend_", FRONTEND), ("tandem_router_", ROUTER_ADMIN), ("tandem_worker_", WORKER_ADMIN)];
    let by_metrics = families.into_iter().find(|(family, _)| has(family)).map(|(_, kind)| kind);
    if by_metrics == Some(FRONTEND) && http::get(&at, PROBE_TIMEOUT, "/v1/models").is_ok_and(|models| models.status == 404) {
        return Some(FRONTEND_ADMIN);
    }
    // A frontend with API keys answers /metrics to trusted peers only.
    let is_live =
        || http::get(&at, PROBE_TIMEOUT, "/live").is_ok_and(|live| live.status == 200 && live.body == r#"{"status":"ok"}"#);
    Some(by_metrics.unwrap_or_else(|| if is_live() { FRONTEND } else { "an HTTP server of another program" }))
}

/// Returns the protocol of a server that does not answer HTTP/1.1; `None` if no server accepts the connection.
fn protocol(at: &str) -> Option<&'static str> {
    // The HTTP/2 connection preface, with an empty SETTINGS frame.
    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let mut stream = at.to_socket_addrs().ok()?.find_map(|at| TcpStream::connect_timeout(&at, PROBE_TIMEOUT).ok())?;
    let mut head = [0; 4];
    let sent = stream.set_read_timeout(Some(PROBE_TIMEOUT)).and_then(|()| stream.write_all(PREFACE));
    Some(match sent.and_then(|()| stream.read_exact(&mut head)) {
        // A server's first frame is its SETTINGS, whose type is 4.
        Ok(()) if head[3] == 4 => GRPC,
        Ok(()) if head[0] != TLS_ALERT => "a server of another protocol",
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => SILENT,
        _ => TLS,
    })
}

/// What answers at a port whose process does not answer.
pub(crate) const SILENT: &str = "a port that accepts connections and does not answer: its process hangs or is stopped";

/// The type of the record with which a server with TLS answers bytes that are not TLS. Some close the connection instead.
const TLS_ALERT: u8 = 21;

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn address(text: &str) -> Result<ServerAddress, &'static str> {
        text.parse()
    }

    #[test]
    fn server_is_named_by_port_address_or_url() {
        for (text, base_url, host_port) in [
            ("8001", "http://127.0.0.1:8001", "127.0.0.1:8001"),
            ("localhost:8001", "http://localhost:8001", "localhost:8001"),
            ("10.0.0.1:80", "http://10.0.0.1:80", "10.0.0.1:80"),
            ("[::1]:8001", "http://[::1]:8001", "[::1]:8001"),
            ("http://host:1/", "http://host:1", "host:1"),
            ("http://[::1]/", "http://[::1]", "[::1]:80"),
            ("https://api.example/v1", "https://api.example", "api.example:443"),
            ("https://api.example/openai/v1/", "https://api.example/openai", "api.example:443"),
        ] {
            let address = address(text).expect("the address is valid");
            assert_eq!((&*address.base_url, &*address.host_port()), (base_url, host_port), "{text}");
        }
        for wrong in ["host", "ftp://host", "http://", "", "99999"] {
            assert!(address(wrong).is_err(), "{wrong}");
        }
    }

    /// Returns what answers at a port whose server sends `reply`, or `other` to a request for its models, and closes the connection.
    fn kind_of(reply: &'static [u8], other: &'static [u8]) -> Option<&'static str> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let at = listener.local_addr().expect("the listener is bound").to_string();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.expect("the listener accepts");
                // The request must be read, or the connection would be reset instead of closed.
                let mut request = [0; 4096];
                let _ = stream.read(&mut request);
                let _ = stream.write_all(if request.starts_with(b"GET /v1/models") { other } else { reply });
            }
        });
        kind(&address(&at).expect("the address is valid"))
    }

    #[test]
    fn port_that_does_not_answer_is_not_taken_for_tls() {
        let silent = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let at = silent.local_addr().expect("the listener is bound").to_string();
        assert_eq!(kind(&address(&at).expect("the address is valid")), Some(SILENT));
    }

    #[test]
    fn request_to_a_starting_server_is_sent_again() {
        let replies = std::cell::RefCell::new(vec![None, Some("downloads M: 41%")]);
        let send = || {
            let step = replies.borrow_mut().pop().expect("the request is not sent again after the last reply");
            let reply = Response::builder().status(if step.is_some() { 503 } else { 200 });
            let reply = step.into_iter().fold(reply, |reply, step| reply.header(STARTING, step));
            Ok(reply.body(Body::builder().data("")).expect("the reply is valid"))
        };
        assert_eq!(started(send).expect("the server answers").status(), 200);
        assert!(replies.borrow().is_empty());
    }

    #[test]
    fn kind_of_a_server_is_recognized_by_its_answer() {
        let unused = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port is free");
        assert_eq!(kind(&address(&unused.to_string()).expect("the address is valid")), None);
        let frontend = b"HTTP/1.1 200 OK\r\ncontent-length: 25\r\n\r\ntandem_frontend_ready 1\r\n";
        assert_eq!(kind_of(frontend, b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n"), Some(FRONTEND));
        assert_eq!(kind_of(frontend, b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"), Some(FRONTEND_ADMIN));
        for (reply, words) in [
            (&b"HTTP/1.1 200 OK\r\ncontent-length: 27\r\n\r\ntandem_router_workers{} 1\r\n"[..], "admin port of a router"),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 25\r\n\r\ntandem_worker_blocks{} 1\n", "admin port of a worker"),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", "another program"),
            (b"\0\0\0\x04\0\0\0\0\0", "gRPC"),
            (b"\x15\x03\x03\0\x02\x02\x28", "TLS"),
            (b"", "TLS"),
            (b"SSH-2.0-OpenSSH\r\n", "another protocol"),
        ] {
            let kind = kind_of(reply, reply);
            assert!(kind.is_some_and(|kind| kind.contains(words)), "{words}: {kind:?}");
        }
    }
}
