//! The role of a process in its certificate, and the calls that each role may make.
//!
//! A certificate names its process in a URI: `spiffe://DOMAIN/tandem/CLUSTER/ROLE`. SPIRE and cert-manager issue such certificates.

use rustls::pki_types::CertificateDer;
use std::fmt;

/// The role that a certificate gives to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerRole {
    /// A frontend.
    Frontend,
    /// A router.
    Router,
    /// A prefill worker.
    PrefillWorker,
    /// A decode worker.
    DecodeWorker,
    /// A command of an operator, such as `tandem top`.
    Tool,
}

/// The process that a certificate names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The name of the cluster.
    pub cluster: String,
    /// The role of the process.
    pub role: PeerRole,
}

impl PeerRole {
    /// All roles.
    pub const ALL: [Self; 5] = [Self::Frontend, Self::Router, Self::PrefillWorker, Self::DecodeWorker, Self::Tool];

    /// Returns the role's name, as in its certificate.
    pub fn name(self) -> &'static str {
        match self {
            Self::Frontend => "frontend",
            Self::Router => "router",
            Self::PrefillWorker => "prefill-worker",
            Self::DecodeWorker => "decode-worker",
            Self::Tool => "tool",
        }
    }

    /// Returns whether a process of this role may call the gRPC method with this path. Processes call some methods of their own role, to
    /// check their readiness.
    pub(super) fn may_call(self, path: &str) -> bool {
        let method = path.strip_prefix("/tandem.v1.").unwrap_or_default();
        match self {
            Self::Frontend => {
                matches!(method, "Router/Route" | "Router/Explain" | "Router/Workers") || method.starts_with("Decode/")
            }
            Self::Router => {
                let reads_worker = method.starts_with("Control/") && method != "Control/Drain";
                matches!(method, "Router/Bookings" | "Router/Workers") || reads_worker
            }
            Self::PrefillWorker => method == "Control/Describe" || method.starts_with("Transfer/"),
            Self::DecodeWorker => method == "Control/Describe" || method.starts_with("Prefill/"),
            Self::Tool => matches!(method, "Router/Workers" | "Control/Drain"),
        }
    }
}

impl Peer {
    /// Reads the peer's name in a certificate. `None`: no process of Tandem has such a name.
    pub(super) fn parse(uri: &str) -> Option<Self> {
        let (domain, path) = uri.strip_prefix("spiffe://")?.split_once('/')?;
        let (cluster, role) = path.strip_prefix("tandem/")?.split_once('/')?;
        let role = PeerRole::ALL.into_iter().find(|known| known.name() == role)?;
        (!domain.is_empty() && !cluster.is_empty()).then(|| Self { cluster: cluster.to_owned(), role })
    }

    /// Returns the process that a certificate names; `None` if it names none.
    pub fn of(certificate: &CertificateDer<'_>) -> Option<Self> {
        webpki::EndEntityCert::try_from(certificate).ok()?.valid_uri_names().find_map(Self::parse)
    }

    /// Returns the URI that names this peer in its certificate.
    pub fn uri(&self, domain: &str) -> String {
        format!("spiffe://{domain}/tandem/{self}")
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.cluster, self.role.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificate_names_cluster_and_role() {
        for role in PeerRole::ALL {
            let peer = Peer { cluster: "east".to_owned(), role };
            assert_eq!(Peer::parse(&peer.uri("example.org")), Some(peer));
        }
        let others =
            ["spiffe://d/tandem/c/boss", "spiffe://d/c/router", "spiffe:///tandem/c/router", "https://d/tandem/c/router"];
        for other in others.into_iter().chain(["spiffe://d/tandem//router", "spiffe://d/tandem/c/router/x", "router"]) {
            assert_eq!(Peer::parse(other), None, "{other}");
        }
    }

    #[test]
    fn each_method_permits_only_its_callers() {
        use PeerRole::{DecodeWorker, Frontend, PrefillWorker, Router, Tool};
        let table: [(&str, &[PeerRole]); 15] = [
            ("Router/Route", &[Frontend]),
            ("Router/Explain", &[Frontend]),
            ("Router/Workers", &[Frontend, Router, Tool]),
            ("Router/Bookings", &[Router]),
            ("Control/Describe", &[Router, PrefillWorker, DecodeWorker]),
            ("Control/Watch", &[Router]),
            ("Control/Snapshot", &[Router]),
            ("Control/Drain", &[Tool]),
            ("Decode/Generate", &[Frontend]),
            ("Decode/Finish", &[Frontend]),
            ("Prefill/Prefill", &[DecodeWorker]),
            ("Transfer/Push", &[PrefillWorker]),
            ("Transfer/NcclControl", &[PrefillWorker]),
            ("Unknown/Method", &[]),
            ("", &[]),
        ];
        for (method, callers) in table {
            for role in PeerRole::ALL {
                assert_eq!(role.may_call(&format!("/tandem.v1.{method}")), callers.contains(&role), "{role:?} calls {method}");
            }
        }
        assert!(!Router.may_call("/other.Router/Workers"));
    }
}
