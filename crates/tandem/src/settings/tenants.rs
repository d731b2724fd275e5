//! Settings for several tenants on one frontend: accounts, isolation of the prefix cache, and which peers are trusted.

use super::common::with_commas;
use clap::Args;
use serde::Serialize;
use std::{net::IpAddr, path::PathBuf};
use tandem_frontend::{CacheIsolation, ExposeDetails, HeaderName, IpNet};

/// The frontend's settings for tenants.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[command(next_help_heading = "Tenants")]
#[serde(rename_all = "kebab-case")]
pub struct TenantArgs {
    /// File with the TLS certificate of --listen and its chain, in PEM format. --listen then accepts TLS only; --admin-listen stays plain. The
    /// file is read again when it changes [default: none; --listen has no TLS]
    #[arg(long, env = "TANDEM_TLS_CERT", value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,

    /// File with the private key of --tls-cert, in PEM format [default: none]
    #[arg(long, env = "TANDEM_TLS_KEY", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,

    /// File with the API keys of clients, which `tandem key add` makes. Each request of the API then needs a key, in the header
    /// `Authorization: Bearer` or `x-api-key`, and has the key's account and limits. The file is read again when it changes [default: none;
    /// requests need no key]
    #[arg(long, env = "TANDEM_API_KEYS_FILE", value_name = "FILE")]
    pub api_keys_file: Option<PathBuf>,

    /// File to which one JSON line is appended for each call of the API: time, request id, key, account, path, model, status, token counts
    /// and duration, but no text [default: none]
    #[arg(long, env = "TANDEM_AUDIT_LOG", value_name = "FILE")]
    pub audit_log: Option<PathBuf>,

    /// Disk space for --audit-log FILE and its seven old files, FILE.1 (the latest) to FILE.7; the oldest is deleted. A FILE
    /// that is already longer at the start is renamed like the others, and takes its space until it is the oldest. The default holds the lines of about 3 million calls
    #[arg(long, env = "TANDEM_AUDIT_LOG_MAX_BYTES", value_name = "BYTES", default_value_t = 1 << 30, value_parser = clap::value_parser!(u64).range(1 << 20..))]
    pub audit_log_max_bytes: u64,

    /// Origins of the web pages that may use the API from a browser, as SCHEME://HOST or SCHEME://HOST:PORT, separated by commas; * allows all
    /// pages, and needs --api-keys-file [default: none; pages of other sites are refused]
    #[arg(long, env = "TANDEM_CORS_ORIGIN", value_name = "ORIGINS", value_delimiter = ',', value_parser = origin)]
    #[serde(serialize_with = "with_commas")]
    pub cors_origin: Vec<String>,

    /// Name of the header that holds a request's account, such as x-account. The proxy that authenticates your clients sets it; it is
    /// accepted from --trusted-proxies only, and needs that flag. Ledgers record it, and `tandem audit report` sums by it [default: none]
    #[arg(long, env = "TANDEM_ACCOUNT_HEADER", value_name = "NAME", value_parser = header_name)]
    pub account_header: Option<String>,

    /// Which requests share cached KV. Clients that share a cache can find out, by timing and cached_tokens, how another client's prompt
    /// begins [default: account with --api-keys-file or --account-header, because accounts need not trust each other; else shared]
    #[arg(long, env = "TANDEM_CACHE_ISOLATION", value_enum)]
    pub cache_isolation: Option<CacheIsolation>,

    /// Addresses or networks (10.0.0.0/8) of the proxies in front of the frontend, separated by commas. Only they may set the account
    /// header and `traceparent`, and request details [default: programs on this machine while --listen is a loopback address, for requests
    /// without a forwarding header such as X-Forwarded-For; else none]
    #[arg(long, env = "TANDEM_TRUSTED_PROXIES", value_name = "NETWORKS", value_delimiter = ',', value_parser = network)]
    #[serde(serialize_with = "with_commas")]
    pub trusted_proxies: Vec<IpNet>,

    /// Which clients may use the headers x-tandem-details and x-tandem-explain, and open /dashboard on --listen. The default is trusted,
    /// because these headers and pages show which prompts are cached and where
    #[arg(long, env = "TANDEM_EXPOSE_DETAILS", value_enum, default_value_t)]
    pub expose_details: ExposeDetails,
}

impl TenantArgs {
    /// Returns which requests share cached KV, and applies the default if the flag is not set.
    pub fn isolation(&self) -> CacheIsolation {
        let has_accounts = self.account_header.is_some() || self.api_keys_file.is_some();
        let by_default = if has_accounts { CacheIsolation::Account } else { CacheIsolation::Shared };
        self.cache_isolation.unwrap_or(by_default)
    }
}

fn header_name(text: &str) -> Result<String, &'static str> {
    text.parse::<HeaderName>().map(|name| name.to_string()).map_err(|_| "write the name of an HTTP header")
}

/// Checks that the text is what browsers send in the header `Origin`: scheme, host and port, in lower case and without a path.
fn origin(text: &str) -> Result<String, &'static str> {
    let is_authority =
        |rest: &str| rest.parse::<ureq::http::uri::Authority>().is_ok() && !rest.contains(|c: char| c.is_uppercase() || c == '@');
    let is_origin = text.split_once("://").is_some_and(|(scheme, rest)| matches!(scheme, "http" | "https") && is_authority(rest));
    if text == "*" || is_origin {
        Ok(text.to_owned())
    } else {
        Err("write *, or scheme and host in lower case, such as https://chat.example")
    }
}

fn network(text: &str) -> Result<IpNet, &'static str> {
    let address = || text.parse::<IpAddr>().map(IpNet::from);
    text.parse().or_else(|_| address()).map_err(|_| "write an address, or a network such as 10.0.0.0/8")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cli::{Cli, Command},
        settings::UpSettings,
    };
    use std::ffi::OsString;

    fn read(args: &[&str]) -> Result<UpSettings, String> {
        let args = ["tandem", "up"].iter().chain(args).map(OsString::from).collect();
        match Cli::read(args, None).map_err(|error| error.to_string())?.command {
            Command::Up(up) => Ok(up.role),
            other => unreachable!("the command is up: {other:?}"),
        }
    }

    #[test]
    fn accounts_are_isolated_unless_the_operator_shares_the_cache() {
        use CacheIsolation::{Account, Shared};
        for (args, expected) in [
            (&[][..], Shared),
            (&["--account-header", "x-account"], Account),
            (&["--api-keys-file", "keys.toml"], Account),
            (&["--api-keys-file", "keys.toml", "--cache-isolation", "shared"], Shared),
            (&["--account-header", "x-account", "--cache-isolation", "shared"], Shared),
            (&["--account-header", "x-account", "--cache-isolation", "account"], Account),
            (&["--cache-isolation", "shared"], Shared),
        ] {
            let args = [args, &["--trusted-proxies", "10.0.0.1"]].concat();
            assert_eq!(read(&args).expect("the settings are valid").frontend.tenants.isolation(), expected, "{args:?}");
        }
    }

    #[test]
    fn cache_isolation_by_account_needs_an_account_header() {
        let error = read(&["--cache-isolation", "account"]).expect_err("account isolation without an account header is refused");
        assert!(error.contains("--account-header <NAME>"), "{error}");
    }

    #[test]
    fn keys_exclude_the_account_header_and_permit_every_cors_origin() {
        let error = read(&["--api-keys-file", "k", "--account-header", "x-a", "--trusted-proxies", "10.0.0.1"]);
        assert!(error.is_err_and(|error| error.contains("--account-header cannot be used with --api-keys-file")));
        let error = read(&["--cors-origin", "https://chat.example,*"]).expect_err("without keys, all pages could use the API");
        assert!(error.contains("--cors-origin * needs --api-keys-file"), "{error}");
        read(&["--cors-origin", "*", "--api-keys-file", "k"]).expect("the settings are valid");
        let settings = read(&["--cors-origin", "https://chat.example:8443,http://[::1]:3000"]).expect("the origins are valid");
        assert_eq!(settings.frontend.tenants.cors_origin, ["https://chat.example:8443", "http://[::1]:3000"]);
        for wrong in [
            "chat.example",
            "https://chat.example/",
            "https://Chat.example",
            "https://a@b.example",
            "ftp://a",
            "https://",
            "null",
        ] {
            assert!(read(&["--cors-origin", wrong]).is_err_and(|error| error.contains("scheme and host")), "{wrong}");
        }
    }

    #[test]
    fn account_header_without_trusted_proxies_is_refused() {
        const ACCOUNT: [&str; 2] = ["--account-header", "x-account"];
        for listen in ["0.0.0.0:8000", "[::1]:8000"] {
            let error = read(&[&ACCOUNT[..], &["--listen", listen]].concat())
                .expect_err("an account header without a trusted proxy is refused");
            assert!(error.contains("x-account") && error.contains("--trusted-proxies"), "{error}");
        }
        read(&[&ACCOUNT[..], &["--trusted-proxies", "127.0.0.1"]].concat())
            .expect("an account header with a trusted proxy is valid");
        read(&["--listen", "0.0.0.0:8000"]).expect("a public address without accounts is valid");
    }

    #[test]
    fn trusted_proxies_are_addresses_or_networks_and_can_be_read_back() {
        let settings = read(&["--trusted-proxies", "10.0.0.0/8,192.168.1.7,fd00::/8"]).expect("the settings are valid");
        let written: Vec<_> = settings.frontend.tenants.trusted_proxies.iter().map(IpNet::to_string).collect();
        assert_eq!(written, ["10.0.0.0/8", "192.168.1.7/32", "fd00::/8"]);
        let toml = toml::to_string(&settings).expect("the settings can be serialized");
        assert!(toml.contains("trusted-proxies = \"10.0.0.0/8,192.168.1.7/32,fd00::/8\""), "{toml}");
        for wrong in ["proxy.example", "10.0.0.0/33", "10.0.0.1,x"] {
            let error = read(&["--trusted-proxies", wrong]).expect_err(wrong);
            assert!(error.contains("write an address, or a network"), "{error}");
        }
    }
}
