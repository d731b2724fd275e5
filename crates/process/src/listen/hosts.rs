//! The host names that are accepted in the header `Host`. A browser sends the name from its address bar, so a request from a page whose name
//! resolves to this server's address (DNS rebinding) is detected.

use axum::http::{HeaderMap, header, uri::Authority};
use std::{net::IpAddr, sync::Arc};

/// The names that the header `Host` may have. IP addresses, `localhost` and names that end in `.localhost` are always accepted, because no
/// page of another host can have them as its name. It is cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Hosts(Arc<[String]>);

impl Hosts {
    /// Accepts these names, which have no ports. Upper and lower case are not distinguished. Empty names are ignored.
    pub fn new(names: impl IntoIterator<Item = String>) -> Self {
        Self(names.into_iter().filter(|name| !name.is_empty()).collect())
    }

    /// Returns whether only the names that are always accepted are accepted.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether a request with these headers may be answered. HTTP/1.0 clients may omit `Host`; browsers never do.
    pub fn accept(&self, headers: &HeaderMap) -> bool {
        let Some(host) = headers.get(header::HOST) else { return true };
        let Ok(authority) = Authority::try_from(host.as_bytes()) else { return false };
        let name = authority.host().trim_end_matches('.').to_ascii_lowercase();
        let is_ip = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().is_ok();
        let is_local = name == "localhost" || name.ends_with(".localhost");
        is_ip || is_local || self.0.iter().any(|accepted| accepted.trim_end_matches('.').eq_ignore_ascii_case(&name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    #[test]
    fn only_configured_names_local_names_and_ip_addresses_are_accepted() {
        let hosts = Hosts::new(["llm.example".to_owned(), String::new()]);
        for (host, ours) in [
            ("localhost", true),
            ("LocalHost.:8000", true),
            ("tandem.localhost:8000", true),
            ("127.0.0.1:8000", true),
            ("[::1]:8000", true),
            ("192.168.0.7", true),
            ("llm.example:80", true),
            ("LLM.example", true),
            ("evil.example", false),
            ("localhost.evil.example", false),
            ("evillocalhost", false),
            ("127.0.0.1.evil.example", false),
            ("llm.example@evil.example", false),
            ("", false),
            (".", false),
            ("a b", false),
        ] {
            let headers = HeaderMap::from_iter([(header::HOST, HeaderValue::from_static(host))]);
            assert_eq!(hosts.accept(&headers), ours, "{host}");
        }
        assert!(hosts.accept(&HeaderMap::new()));
    }
}
