//! Rules that concern several settings. clap would check such rules for flags and variables only, because for clap, values from the file
//! are defaults.

use crate::settings::{EngineKind, KV_LEASE_SECONDS, KvConnector};
use clap::{ArgMatches, ValueEnum, parser::ValueSource};
use std::net::SocketAddr;
use tandem_frontend::CacheIsolation;

/// Groups of settings, of which at most one may be set.
const ALTERNATIVES: &[&[&str]] = &[
    &["workers", "workers-file", "etcd"],
    &["peers", "etcd"],
    &["router", "etcd"],
    &["etcd-password", "etcd-password-file"],
    &["nats-user", "nats-token", "nats-creds", "nats-nkey"],
    &["nats-password", "nats-password-file"],
    &["hf-token", "hf-token-file"],
    &["account-header", "api-keys-file"],
    &["tls-cert", "tls-self-signed"],
];

/// Pairs of groups: each setting of the first group needs at least one setting of the second.
const NEEDS: &[(&[&str], &[&str])] = &[
    (&["etcd-user", "etcd-ca"], &["etcd"]),
    (&["etcd-user"], &["etcd-password", "etcd-password-file"]),
    (&["etcd-password", "etcd-password-file"], &["etcd-user"]),
    (&["etcd-cert"], &["etcd-ca"]),
    (&["etcd-cert"], &["etcd-key"]),
    (&["etcd-key"], &["etcd-cert"]),
    (&["nats-user", "nats-token", "nats-creds", "nats-nkey", "nats-ca", "nats-cert"], &["nats"]),
    (&["nats-user"], &["nats-password", "nats-password-file"]),
    (&["nats-password", "nats-password-file"], &["nats-user"]),
    (&["nats-cert"], &["nats-key"]),
    (&["nats-key"], &["nats-cert"]),
    (&["tls-cert"], &["tls-key"]),
    (&["tls-key"], &["tls-cert"]),
    (&["passthrough-key-file", "passthrough-ca"], &["passthrough"]),
    (&["prefill-engine-url", "engine-key-file", "engine-ca", "engine-rank", "trust-engine-model"], &["engine-url"]),
];

/// Settings of engines in Tandem's processes. An external engine has settings of its own.
const SETTINGS_OF_OWN_ENGINES: &[&str] = &["kv-capacity-tokens", "prefill-chunk-budget", "slo-itl"];

/// Settings that llama.cpp servers do not need, besides those with default values.
const SETTINGS_OF_OTHERS: &[&str] = &["prefill-engine-url", "engine-events-replay", "engine-rank"];

/// Settings of a frontend that an endpoint picker does not have.
const SETTINGS_OF_FRONTENDS: &[&str] =
    &["api-keys-file", "audit-log", "cors-origin", "tool-call-parser", "reasoning-parser", "passthrough"];

/// Settings of an endpoint picker whose router and workers are other processes.
const SETTINGS_OF_PICKERS_ALONE: &[&str] = &["router", "etcd", "advertise", "cluster-cert", "cluster-cert-key", "cluster-ca"];

/// Settings of a router, which an endpoint picker has only with its own router and workers.
const SETTINGS_OF_ROUTERS: &[&str] = &["policy", "prefill", "slo-ttft", "slo-itl"];

/// Checks the settings of a role, whichever layers they come from.
pub(super) fn check(role: &str, given: &ArgMatches) -> Result<(), String> {
    let is_set = |flag: &&&str| {
        let id = flag.replace('-', "_");
        // A flag without a value is false if it is not given.
        given.try_get_one::<bool>(&id).map_or_else(|_| given.try_contains_id(&id).unwrap_or(false), |set| set == Some(&true))
    };
    for alternatives in ALTERNATIVES {
        let mut set = alternatives.iter().filter(is_set);
        if let (Some(one), Some(other)) = (set.next(), set.next()) {
            return Err(format!("--{one} cannot be used with --{other}; set only one of them"));
        }
    }
    for (flags, needed) in NEEDS {
        if let Some(flag) = flags.iter().find(is_set)
            && !needed.iter().any(|flag| is_set(&flag))
        {
            return Err(format!("--{flag} needs --{}", needed.join(" or --")));
        }
    }
    check_engine(role, given, is_set)?;
    check_observing(role, given, is_set)?;
    check_kv_capacity(given)?;
    let listens = |id| given.try_get_one::<SocketAddr>(id).ok().flatten();
    if let Some(address) = listens("listen").filter(|address| address.port() != 0 && listens("admin_listen") == Some(address)) {
        return Err(format!("--listen and --admin-listen are both {address}; choose another port for one of them"));
    }
    let mut passed = given.try_get_many::<String>("passthrough").ok().flatten().into_iter().flatten();
    if passed.next().is_some_and(|first| first.starts_with("http://") || first.starts_with("https://")) {
        return Err("--passthrough begins with a URL; write the model's id before it, as MODEL=URL".to_owned());
    }
    let mut origins = given.try_get_many::<String>("cors_origin").ok().flatten().into_iter().flatten();
    if origins.any(|origin| origin == "*") && !is_set(&&"api-keys-file") {
        return Err(
            "--cors-origin * needs --api-keys-file: without keys, every web page that a user of this server opens could use it; \
                    list the origins of your own pages, such as https://chat.example"
                .to_owned(),
        );
    }
    let header = given.try_get_one::<String>("account_header").ok().flatten();
    let isolation = given.try_get_one::<CacheIsolation>("cache_isolation").ok().flatten();
    match header {
        None if isolation == Some(&CacheIsolation::Account) && !is_set(&&"api-keys-file") => {
            Err("--cache-isolation account needs --api-keys-file <FILE> or --account-header <NAME>".to_owned())
        }
        // The proxies must be listed also for a loopback listener: a local proxy that adds no forwarding header cannot be distinguished
        // from other local programs, and would pass on accounts that clients invent.
        Some(header) if !is_set(&&"trusted-proxies") => Err(format!(
            "--account-header {header} is accepted from trusted proxies only, and none is listed; list the addresses of the proxy that sets \
             the header in --trusted-proxies (127.0.0.1 for a proxy on this machine)"
        )),
        _ => Ok(()),
    }
}

/// Checks the settings of an endpoint picker, and of a worker that only observes its server.
fn check_observing(role: &str, given: &ArgMatches, is_set: impl Fn(&&&str) -> bool) -> Result<(), String> {
    let engine = given.try_get_one::<EngineKind>("engine").ok().flatten().copied().unwrap_or_default();
    match (role, is_set(&&"observe")) {
        ("epp", true) => {
            return Err("--observe is for decode workers; `tandem epp` observes the servers in its --engine-url".to_owned());
        }
        ("up" | "prefill-worker", true) => {
            return Err("--observe is for decode workers; `tandem epp --engine-url` observes servers in one process".to_owned());
        }
        ("epp", false) | (_, true) if engine != EngineKind::Vllm => {
            return Err("only vLLM servers can be observed; set --engine vllm".to_owned());
        }
        ("epp", false) => {}
        _ => return Ok(()),
    }
    if let Some(flag) = SETTINGS_OF_FRONTENDS.iter().find(&is_set) {
        return Err(format!("--{flag} has no effect with `tandem epp`; configure the gateway, or run `tandem up`"));
    }
    let has_workers = is_set(&&"engine-url");
    if let Some(flag) = SETTINGS_OF_PICKERS_ALONE.iter().find(|flag| has_workers && is_set(flag)) {
        return Err(format!("--{flag} cannot be used with --engine-url, which starts a router here; set only one of them"));
    }
    // A file, which counts as a default, may have the settings for the router of its cluster.
    let is_given = |flag: &&&str| {
        let source = given.value_source(&flag.replace('-', "_"));
        source.is_some_and(|source| source != ValueSource::DefaultValue)
    };
    match SETTINGS_OF_ROUTERS.iter().find(is_given).filter(|_| !has_workers) {
        Some(flag) => Err(format!("--{flag} needs --engine-url here; it is a setting of `tandem router`")),
        None => Ok(()),
    }
}

/// Checks that the KV memory holds at least one block. The engine would round it up, and refuse nearly every prompt.
fn check_kv_capacity(given: &ArgMatches) -> Result<(), String> {
    let number = |id: &str| given.try_get_one::<u32>(id).ok().flatten().copied();
    match number("kv_capacity_tokens").zip(number("block_size")) {
        Some((tokens, block_size)) if tokens < block_size => Err(format!(
            "--kv-capacity-tokens {tokens} is less than one block of {block_size} tokens (--block-size); a worker needs memory for the tokens of \
             every running prompt and answer: set thousands, or leave it out"
        )),
        _ => Ok(()),
    }
}

/// Checks the settings of an external engine.
fn check_engine(role: &str, given: &ArgMatches, is_set: impl Fn(&&&str) -> bool) -> Result<(), String> {
    let engine = given.try_get_one::<EngineKind>("engine").ok().flatten().copied().unwrap_or_default();
    let urls = given.try_get_many::<String>("engine_url").ok().flatten().map_or(0, Iterator::count);
    let Some(server) = engine.server() else {
        return if urls == 0 { Ok(()) } else { Err("--engine-url needs --engine vllm, sglang or llama-cpp".to_owned()) };
    };
    let name = engine.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
    // With a router in the process, --slo-itl is also the router's service level.
    let has_no_effect = |flag: &&&str| is_set(flag) && (role.ends_with("worker") || **flag != "slo-itl");
    if let Some(flag) = SETTINGS_OF_OWN_ENGINES.iter().find(has_no_effect) {
        return Err(format!("--{flag} has no effect with --engine {name}; leave it out, and configure the {server} server"));
    }
    match engine {
        EngineKind::LlamaCpp => check_llama_cpp(role, given, is_set)?,
        EngineKind::Sglang => check_sglang(given, urls, is_set)?,
        _ => check_vllm(role, given, urls, is_set)?,
    }
    match (role, urls) {
        ("frontend", _) | ("epp", 0) if !given.try_contains_id("model").unwrap_or(false) => Err(format!(
            "--engine {name} needs --model here: the model of the {server} servers, for its tokenizer and chat template"
        )),
        ("frontend" | "epp", _) | ("up", 1..) | (_, 1) => Ok(()),
        (_, 0) => Err(format!("--engine {name} needs --engine-url with the URL of a {server} server")),
        _ => Err("a worker has one engine: start a worker for each URL in --engine-url, or use `tandem up`".to_owned()),
    }
}

/// Checks the settings of servers that publish KV events. `urls` is the number of servers in `--engine-url`, and `without_cache` the flag with
/// which a server reuses no prompts.
fn check_events(
    given: &ArgMatches,
    urls: usize,
    without_cache: (&str, &str),
    is_set: impl Fn(&&&str) -> bool,
) -> Result<(), String> {
    let events = given.try_get_one::<String>("engine_events").ok().flatten();
    let has_endpoint = events.is_some_and(|events| !matches!(&**events, "discover" | "none"));
    if has_endpoint && (urls > 1 || is_set(&&"prefill-engine-url")) {
        return Err(
            "--engine-events with an endpoint is for one server; with several, use `discover`, or a worker process for each"
                .to_owned(),
        );
    }
    if !has_endpoint && is_set(&&"engine-events-replay") {
        return Err("--engine-events-replay needs --engine-events with an endpoint".to_owned());
    }
    if given.try_get_one::<bool>("no_prefix_caching").ok().flatten() == Some(&true) {
        let (server, flag) = without_cache;
        return Err(format!(
            "--no-prefix-caching has no effect with --engine {}; start the {server} server with {flag}",
            server.to_ascii_lowercase()
        ));
    }
    Ok(())
}

/// Returns the flags that are set and concern the exchange of KV between vLLM servers.
fn exchange_of_vllm(given: &ArgMatches) -> impl Iterator<Item = &'static str> {
    let connector = given.try_get_one::<KvConnector>("engine_kv_connector").ok().flatten();
    let lease = given.try_get_one::<u64>("engine_kv_lease").ok().flatten();
    let flags = [
        ("engine-kv-connector", connector.is_some_and(|connector| *connector != KvConnector::None)),
        ("engine-kv-lease", lease.is_some_and(|seconds| *seconds != KV_LEASE_SECONDS)),
    ];
    flags.into_iter().filter_map(|(flag, is_set)| is_set.then_some(flag))
}

/// Checks the settings of SGLang servers, which know by their own flags how they exchange KV.
fn check_sglang(given: &ArgMatches, urls: usize, is_set: impl Fn(&&&str) -> bool) -> Result<(), String> {
    if let Some(flag) = exchange_of_vllm(given).next() {
        return Err(format!(
            "--{flag} is for --engine vllm only; leave it out: SGLang servers exchange KV as their --disaggregation-mode says"
        ));
    }
    check_events(given, urls, ("SGLang", "--disable-radix-cache"), is_set)
}

/// Checks the settings of vLLM servers. `urls` is the number of servers in `--engine-url`.
fn check_vllm(role: &str, given: &ArgMatches, urls: usize, is_set: impl Fn(&&&str) -> bool) -> Result<(), String> {
    check_events(given, urls, ("vLLM", "--no-enable-prefix-caching"), is_set)?;
    let connector = given.try_get_one::<KvConnector>("engine_kv_connector").ok().flatten();
    if role == "prefill-worker" && connector != Some(&KvConnector::Nixl) {
        return Err("a prefill worker's vLLM server must send its KV to others: set --engine-kv-connector nixl, and start the server with \
                    NixlConnector in --kv-transfer-config"
            .to_owned());
    }
    Ok(())
}

/// Checks that no setting needs what llama.cpp's server lacks: KV events, ranks, an exchange of KV, and caches of their own for accounts.
fn check_llama_cpp(role: &str, given: &ArgMatches, is_set: impl Fn(&&&str) -> bool) -> Result<(), String> {
    if role == "prefill-worker" {
        return Err(
            "llama.cpp's server cannot send KV to other workers; use decode workers, which prefill their own prompts".to_owned()
        );
    }
    let events = given.try_get_one::<String>("engine_events").ok().flatten().is_some_and(|events| events != "discover");
    let events = events.then_some("engine-events");
    if let Some(flag) = exchange_of_vllm(given).chain(events).chain(SETTINGS_OF_OTHERS.iter().filter(&is_set).copied()).next() {
        return Err(format!("--{flag} is not for --engine llama-cpp; leave it out"));
    }
    let caches = given.try_get_one::<bool>("no_prefix_caching").ok().flatten() == Some(&false);
    let isolation = given.try_get_one::<CacheIsolation>("cache_isolation").ok().flatten();
    let has_accounts = is_set(&&"account-header") || is_set(&&"api-keys-file");
    if role == "up" && caches && has_accounts && isolation != Some(&CacheIsolation::Shared) {
        return Err("llama.cpp's server cannot keep the caches of accounts apart: set --no-prefix-caching, or --cache-isolation shared if \
                    accounts may find out each other's prompts"
            .to_owned());
    }
    Ok(())
}
