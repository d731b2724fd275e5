//! How clients reach the API of a frontend, in URLs and commands that work as they are printed.

use super::reachable;
use crate::{
    running::RunningCluster,
    settings::{FrontendArgs, KeySource},
};
use rustls::pki_types::{CertificateDer, ServerName, pem::PemObject};
use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    path::{Path, PathBuf},
};
use tandem_frontend::ExposeDetails;

/// The address of an API, and what clients need to use it.
#[derive(Clone, Debug)]
pub(super) struct ApiAccess {
    listens: SocketAddr,
    /// The file with the certificate; `None`: the API is served without TLS.
    certificate: Option<PathBuf>,
    needs_key: bool,
    /// Whether a browser on this machine gets the dashboard at the address of the API.
    pub(super) shows_dashboard: bool,
}

impl ApiAccess {
    pub(super) fn new(listens: SocketAddr, FrontendArgs { tenants, dashboard_requests, .. }: &FrontendArgs) -> Self {
        let shows_dashboard = match (tenants.expose_details, &*tenants.trusted_proxies) {
            _ if *dashboard_requests == 0 => false,
            (ExposeDetails::Never, _) => false,
            (ExposeDetails::Always, _) => true,
            (ExposeDetails::Trusted, []) => listens.ip().is_loopback(),
            (ExposeDetails::Trusted, proxies) => proxies.iter().any(|network| network.contains(&reachable(listens).ip())),
        };
        Self { listens, certificate: tenants.tls_cert.clone(), needs_key: tenants.api_keys_file.is_some(), shows_dashboard }
    }

    pub(super) fn is_encrypted(&self) -> bool {
        self.certificate.is_some()
    }

    /// Returns the URL at which this machine reaches the API: with TLS, by a name that the certificate has.
    pub(super) fn url(&self) -> String {
        let at = reachable(self.listens);
        match self.certificate.as_deref().map(|certificate| certified_name(certificate, at.ip())) {
            None => format!("http://{at}"),
            Some(None) => format!("https://{at}"),
            Some(Some(name)) => format!("https://{name}:{}", at.port()),
        }
    }

    /// Returns the entry by which commands of this user find the cluster with this API, router and key.
    pub(super) fn running(&self, router: SocketAddr, key: &KeySource) -> RunningCluster {
        let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
        let key = match key {
            KeySource::File(path) => KeySource::File(absolute(path)),
            KeySource::Secret(_) => key.clone(),
        };
        let ca = self.certificate.as_ref().map(absolute);
        let (frontend, on_all_addresses) = (self.url(), self.listens.ip().is_unspecified());
        RunningCluster { process: std::process::id(), frontend, on_all_addresses, ca, router, key, draining: false }
    }

    /// Returns the URL at which other machines reach an API that listens on all addresses.
    pub(super) fn network_url(&self) -> Option<String> {
        let scheme = if self.is_encrypted() { "https" } else { "http" };
        let host = self.listens.ip().is_unspecified().then(|| own_address(self.listens.ip())).flatten()?;
        Some(format!("{scheme}://{}", SocketAddr::new(host, self.listens.port())))
    }

    /// Warns if every host that reaches this one can use the API.
    pub(super) fn warn_if_open(&self) {
        if !self.needs_key && !self.listens.ip().is_loopback() {
            let url = self.network_url().unwrap_or_else(|| self.url());
            tracing::warn!(
                "every host that reaches {url} can use the API without a key; make keys with `tandem key add NAME --api-keys-file FILE` and start \
                 with --api-keys-file FILE, or listen on 127.0.0.1 only"
            );
        }
    }

    /// Returns the command for a conversation.
    pub(super) fn chat(&self) -> String {
        let variable = if self.needs_key { "TANDEM_API_KEY=YOUR_KEY " } else { "" };
        format!("  {variable}tandem chat {}{}\n", self.url(), self.certificate_flag("--ca"))
    }

    /// Returns the command that sends a request with this quoted body. `headers` are additional flags.
    pub(super) fn curl(&self, path: &str, headers: &str, body: &str) -> String {
        let key = if self.needs_key { " -H 'authorization: Bearer YOUR_KEY'" } else { "" };
        let (url, certificate) = (self.url(), self.certificate_flag("--cacert"));
        format!("  curl -N{certificate} {url}{path} -H 'content-type: application/json'{headers}{key} -d {body}\n")
    }

    /// Returns the command that sends three prompts at once. One decode worker would compute them one after another, so prefill workers compute two of
    /// them. Programs of this machine also get the names of the workers, if the API listens on loopback only.
    pub(super) fn disaggregated(&self, model: &str) -> String {
        let details = if self.listens.ip().is_loopback() { " -H 'x-tandem-details: true'" } else { "" };
        let prompts = ["a", "b", "c"].map(|name| format!(r#"\"{name} $(seq -s ' ' 40)\""#)).join(", ");
        self.curl(
            "/v1/completions",
            details,
            &format!(r#""{{\"model\": \"{model}\", \"max_tokens\": 8, \"prompt\": [{prompts}]}}""#),
        )
    }

    /// Returns the flag with the file of the certificate; empty without TLS.
    fn certificate_flag(&self, flag: &str) -> String {
        self.certificate.as_ref().map_or_else(String::new, |path| format!(" {flag} {}", path.display()))
    }
}

/// Returns a name of this machine that the certificate has: the address itself, `localhost` if it is a loopback address, or else the first name.
fn certified_name(path: &Path, ip: IpAddr) -> Option<String> {
    let certificate = CertificateDer::from_pem_file(path).ok()?;
    let certificate = webpki::EndEntityCert::try_from(&certificate).ok()?;
    let has = |name: ServerName<'_>| certificate.verify_is_valid_for_subject_name(&name).is_ok();
    if has(ip.into()) {
        return None;
    }
    let localhost = "localhost".to_owned();
    if ip.is_loopback() && ServerName::try_from("localhost").is_ok_and(has) {
        return Some(localhost);
    }
    certificate.valid_dns_names().find(|name| !name.contains('*')).map(str::to_owned)
}

/// Returns the address, of the same family, from which this machine reaches other networks. No packet is sent.
fn own_address(family: IpAddr) -> Option<IpAddr> {
    // Addresses that are reserved for documentation.
    let (any, other) = match family {
        IpAddr::V4(_) => (SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)), SocketAddr::from(([192, 0, 2, 1], 9))),
        IpAddr::V6(_) => (SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)), SocketAddr::from(([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1], 9))),
    };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(other).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        frontend: FrontendArgs,
    }

    #[test]
    fn url_has_a_name_of_the_certificate() {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        for (names, expected) in [
            (&["localhost"][..], "https://localhost:8000"),
            (&["a.example", "127.0.0.1"], "https://127.0.0.1:8000"),
            (&["*.b.example", "a.example"], "https://a.example:8000"),
        ] {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let path = folder.path().join("cert.pem");
            let signed = rcgen::generate_simple_self_signed(names).expect("the names are valid");
            std::fs::write(&path, signed.cert.pem()).expect("the folder is writable");
            let access = ApiAccess {
                listens: ([0, 0, 0, 0], 8000).into(),
                certificate: Some(path.clone()),
                needs_key: true,
                shows_dashboard: false,
            };
            assert_eq!(access.url(), expected);
            let file = path.display();
            assert_eq!(access.chat(), format!("  TANDEM_API_KEY=YOUR_KEY tandem chat {expected} --ca {file}\n"));
            let curl = access.curl("/v1", "", "'{}'");
            assert!(curl.starts_with(&format!("  curl -N --cacert {file} {expected}/v1 ")) && curl.contains("Bearer"), "{curl}");
        }
    }

    #[test]
    fn only_an_api_on_all_addresses_has_a_url_for_the_network() {
        let url = |listens: &str| {
            let listens = listens.parse().expect("the address is valid");
            ApiAccess { listens, certificate: None, needs_key: false, shows_dashboard: false }.network_url()
        };
        assert_eq!((url("127.0.0.1:80"), url("10.0.0.1:80")), (None, None));
        assert!(url("0.0.0.0:80").is_none_or(|url| url.starts_with("http://") && !url.contains("0.0.0.0")));
    }
    #[test]
    fn dashboard_is_shown_where_it_is_served() {
        let shows = |listens: &str, flags: &[&str]| {
            let frontend = Flags::parse_from(["up"].iter().chain(flags)).frontend;
            ApiAccess::new(listens.parse().expect("the address is valid"), &frontend).shows_dashboard
        };
        for (listens, flags, expected) in [
            ("127.0.0.1:80", &[][..], true),
            ("127.0.0.1:80", &["--expose-details=never"], false),
            ("127.0.0.1:80", &["--trusted-proxies=10.0.0.0/8"], false),
            ("0.0.0.0:80", &[], false),
            ("0.0.0.0:80", &["--trusted-proxies=10.0.0.0/8,127.0.0.1"], true),
            ("0.0.0.0:80", &["--expose-details=always"], true),
            ("0.0.0.0:80", &["--expose-details=always", "--dashboard-requests=0"], false),
        ] {
            assert_eq!(shows(listens, flags), expected, "{listens} {flags:?}");
        }
    }
}
