//! Decides which peers may send the headers that only trusted peers may send: those that set a request's account, continue a trace, or
//! request details of the cluster.

use crate::{error::ApiError, settings::ExposeDetails};
use axum::http::{HeaderMap, HeaderName, header, request::Parts};
use ipnet::IpNet;
use std::net::IpAddr;
use tandem_api::Problem;
use tandem_process::listen::{PeerAddress, contains};

/// The headers that proxies add to the requests they forward.
const FORWARDED: [HeaderName; 4] =
    [header::FORWARDED, header::VIA, HeaderName::from_static("x-forwarded-for"), HeaderName::from_static("x-real-ip")];

/// Marks a request to the admin listener, as an extension of the request. Every peer that reaches that listener is trusted.
#[derive(Clone, Copy)]
pub(super) struct OnAdminListener;

/// The settings that decide which peers are trusted.
pub(crate) struct Trust {
    /// The networks of the trusted proxies. Empty: peers on this host are trusted if `local`.
    pub(crate) proxies: Vec<IpNet>,
    /// Whether the listener can be reached only from this host.
    pub(crate) local: bool,
    pub(crate) expose: ExposeDetails,
}

impl Trust {
    /// Whether the request comes from a trusted peer. Every peer of the admin listener is trusted, and so is every one of `proxies`. If
    /// `proxies` is empty, a local listener trusts every peer whose request was not forwarded.
    pub(super) fn trusts(&self, request: &Parts) -> bool {
        if request.extensions.get::<OnAdminListener>().is_some() {
            return true;
        }
        if self.proxies.is_empty() {
            return self.local && FORWARDED.iter().all(|name| !request.headers.contains_key(name));
        }
        // Requests over a network in memory have no peer address.
        request.extensions.get().is_some_and(|PeerAddress(address)| self.lists(*address))
    }

    /// Whether this is the address of one of `proxies`.
    pub(super) fn lists(&self, address: IpAddr) -> bool {
        contains(&self.proxies, address)
    }

    /// Whether the peer that sent the request may see where prompts are cached.
    pub(super) fn exposes(&self, request: &Parts) -> bool {
        match self.expose {
            ExposeDetails::Never => false,
            ExposeDetails::Trusted => self.trusts(request),
            ExposeDetails::Always => true,
        }
    }

    /// Whether this header of the request is `true`.
    ///
    /// # Errors
    /// The header is neither `true` nor `false`, or it is `true`, and this peer may not send it. If the header were ignored, a request for an
    /// explanation would be answered and billed like any other.
    pub(super) fn flag(&self, request: &Parts, name: HeaderName) -> Result<bool, ApiError> {
        let wanted = wants(&request.headers, &name)?;
        if wanted && !self.exposes(request) { Err(ApiError::Untrusted { header: name }) } else { Ok(wanted) }
    }
}

/// Whether this header is `true`.
///
/// # Errors
/// The header is neither `true` nor `false`.
pub(super) fn wants(headers: &HeaderMap, name: &HeaderName) -> Result<bool, ApiError> {
    // A proxy may send an empty value in place of no header.
    let Some(value) = headers.get(name).filter(|value| !value.is_empty()) else { return Ok(false) };
    let value = value.to_str().unwrap_or_default().to_ascii_lowercase();
    value.parse().map_err(|_| ApiError::invalid(name.as_str(), Problem::Rule { rule: "must be true or false" }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::Request;

    /// Whether a request from `peer` that has this header is trusted.
    fn trusts(trust: &Trust, peer: &str, header: Option<&str>) -> bool {
        let mut request = Request::builder();
        if let Some(name) = header {
            request = request.header(name, "1.2.3.4");
        }
        let (mut parts, ()) = request.body(()).expect("the request is well-formed").into_parts();
        parts.extensions.insert(PeerAddress(peer.parse().expect("the peer address is valid")));
        trust.trusts(&parts)
    }

    fn trust(proxies: &[&str], local: bool) -> Trust {
        let proxies = proxies.iter().map(|network| network.parse().expect("the network is valid")).collect();
        Trust { proxies, local, expose: ExposeDetails::Trusted }
    }

    #[test]
    fn only_listed_proxies_are_trusted() {
        let trust = trust(&["10.1.0.0/16", "fd00::/8"], true);
        for peer in ["10.1.2.3", "::ffff:10.1.2.3", "fd00::7"] {
            assert!(trusts(&trust, peer, None) && trusts(&trust, peer, Some("x-forwarded-for")), "{peer}");
        }
        for peer in ["10.2.0.1", "127.0.0.1", "::1", "fe80::1"] {
            assert!(!trusts(&trust, peer, None), "{peer}");
        }
    }

    #[test]
    fn without_listed_proxies_only_direct_requests_on_loopback_are_trusted() {
        assert!(trusts(&trust(&[], true), "127.0.0.1", None));
        for header in FORWARDED {
            assert!(!trusts(&trust(&[], true), "127.0.0.1", Some(header.as_str())), "{header}");
        }
        assert!(!trusts(&trust(&[], false), "127.0.0.1", None), "a proxy for remote clients may run on this host");
    }
}
