//! Rules that concern several settings. clap would check such rules for flags and variables only, because it considers values of the file
//! defaults.

use crate::settings::EngineKind;
use clap::ArgMatches;
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
    (&["prefill-engine-url", "engine-key-file", "engine-ca", "engine-rank"], &["engine-url"]),
];

/// Settings of engines in Tandem's processes. An external engine has settings of its own.
const SETTINGS_OF_OWN_ENGINES: &[&str] = &["kv-capacity-tokens", "prefill-chunk-budget"];

/// Checks the settings of a role, whichever layers they come from.
pub(super) fn check(role: &str, given: &ArgMatches) -> Result<(), String> {
    let is_set = |flag: &&&str| given.try_contains_id(&flag.replace('-', "_")).unwrap_or(false);
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
    let header = given.try_get_one::<String>("account_header").ok().flatten();
    let isolation = given.try_get_one::<CacheIsolation>("cache_isolation").ok().flatten();
    match header {
        None if isolation == Some(&CacheIsolation::Account) => {
            Err("--cache-isolation account needs --account-header <NAME>".to_owned())
        }
        // The proxies must be listed also for a loopback listener: a local proxy that adds no forwarding header cannot be distinguished
        // from other local programs, and would pass on accounts that clients invent.
        Some(header) if !is_set(&&"trusted-proxies") => Err(format!(
            "--account-header {header} is accepted from trusted proxies only, and none is listed; list the addresses of the proxy that sets \
             it in --trusted-proxies (127.0.0.1 for one on this machine)"
        )),
        _ => Ok(()),
    }
}

/// Checks the settings of an external engine.
fn check_engine(role: &str, given: &ArgMatches, is_set: impl Fn(&&&str) -> bool) -> Result<(), String> {
    let engine = given.try_get_one::<EngineKind>("engine").ok().flatten();
    let urls = given.try_get_many::<String>("engine_url").ok().flatten().map_or(0, Iterator::count);
    if engine != Some(&EngineKind::Vllm) {
        return if urls == 0 { Ok(()) } else { Err("--engine-url needs --engine vllm".to_owned()) };
    }
    if let Some(flag) = SETTINGS_OF_OWN_ENGINES.iter().find(&is_set) {
        return Err(format!("--{flag} has no effect with --engine vllm; leave it out, and configure the vLLM server"));
    }
    match (role, urls) {
        ("frontend", _) if !is_set(&&"model") => {
            Err("--engine vllm needs --model here: the model of the vLLM servers, for its tokenizer and chat template".to_owned())
        }
        ("frontend", _) | ("up", 1..) | (_, 1) => Ok(()),
        (_, 0) => Err("--engine vllm needs --engine-url with the URL of a vLLM server".to_owned()),
        _ => Err("a worker has one engine: start a worker for each URL in --engine-url, or use `tandem up`".to_owned()),
    }
}
