//! Where KV events travel, if not on the workers' own streams.

use super::secret_file;
use clap::Args;
use serde::{Serialize, Serializer};
use std::path::PathBuf;
use tandem_node::{
    Metrics, Secret,
    events::{Broker, NatsAuth, NatsError, NatsSettings, without_password},
};
use tandem_proto::ClusterKey;

/// Messages of one worker that may wait for a router; see [`NatsSettings::pending_max`].
const PENDING_MAX: usize = 1_024;

/// Addresses with a password in them are refused, but not before settings are shown.
fn without_passwords<S: Serializer>(servers: &[String], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&servers.iter().map(|server| without_password(server)).collect::<Vec<_>>().join(","))
}

/// NATS, for routers and workers.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[command(next_help_heading = "Options of the event plane")]
#[serde(rename_all = "kebab-case")]
pub struct NatsFlags {
    /// host:port of NATS' servers, with commas between: workers publish KV events there, once for all routers [default: each
    /// router hears them from each worker]
    #[arg(long, env = "TANDEM_NATS", value_name = "ADDRESSES", value_delimiter = ',')]
    #[serde(serialize_with = "without_passwords", skip_serializing_if = "Vec::is_empty")]
    pub nats: Vec<String>,

    /// Who we are to NATS, if it asks for a password
    #[arg(long, env = "TANDEM_NATS_USER", value_name = "NAME", requires_all = ["nats", "nats_secret"], group = "nats_auth")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nats_user: Option<String>,

    /// The password; never printed, and not for others to see when it comes from the environment
    #[arg(
        long,
        env = "TANDEM_NATS_PASSWORD",
        value_name = "PASSWORD",
        hide_env_values = true,
        requires = "nats_user",
        group = "nats_secret"
    )]
    #[serde(skip)]
    pub nats_password: Option<Secret>,

    /// A file that holds the password; it is read once, at the start
    #[arg(long, env = "TANDEM_NATS_PASSWORD_FILE", value_name = "FILE", value_parser = secret_file, requires = "nats_user", group = "nats_secret")]
    #[serde(skip)]
    pub nats_password_file: Option<Secret>,

    /// A token, if NATS asks for one; never printed
    #[arg(long, env = "TANDEM_NATS_TOKEN", value_name = "TOKEN", hide_env_values = true, requires = "nats", group = "nats_auth")]
    #[serde(skip)]
    pub nats_token: Option<Secret>,

    /// A file of credentials (a JWT and its seed, as `nsc` writes it)
    #[arg(long, env = "TANDEM_NATS_CREDS", value_name = "FILE", requires = "nats", group = "nats_auth")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nats_creds: Option<PathBuf>,

    /// A file with the seed of an nkey
    #[arg(long, env = "TANDEM_NATS_NKEY", value_name = "FILE", requires = "nats", group = "nats_auth")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nats_nkey: Option<PathBuf>,

    /// A PEM file of whom to believe that it is NATS; connections are encrypted then, whatever its servers want
    #[arg(long, env = "TANDEM_NATS_CA", value_name = "FILE", requires = "nats")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nats_ca: Option<PathBuf>,

    /// Our own certificate, if NATS asks for one
    #[arg(long, env = "TANDEM_NATS_CERT", value_name = "FILE", requires_all = ["nats", "nats_key"])]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nats_cert: Option<PathBuf>,

    /// The key to it
    #[arg(long, env = "TANDEM_NATS_KEY", value_name = "FILE", requires = "nats_cert")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nats_key: Option<PathBuf>,
}

impl NatsFlags {
    /// The connection for a process of this cluster; NATS need not be up yet.
    pub async fn broker(&self, cluster: &str, key: ClusterKey, metrics: &Metrics) -> Result<Option<Broker>, NatsError> {
        if self.nats.is_empty() {
            return Ok(None);
        }
        Broker::open(&self.settings(cluster), key, metrics).await.map(Some)
    }

    fn settings(&self, cluster: &str) -> NatsSettings {
        let password = self.nats_password.clone().or_else(|| self.nats_password_file.clone());
        let auth = match (self.nats_user.clone().zip(password), self.clone()) {
            (Some((name, password)), _) => NatsAuth::User(name, password),
            (None, Self { nats_token: Some(token), .. }) => NatsAuth::Token(token),
            (None, Self { nats_creds: Some(file), .. }) => NatsAuth::Credentials(file),
            (None, Self { nats_nkey: Some(file), .. }) => NatsAuth::Nkey(file),
            _ => NatsAuth::None,
        };
        NatsSettings {
            servers: self.nats.clone(),
            auth,
            ca: self.nats_ca.clone(),
            identity: self.nats_cert.clone().zip(self.nats_key.clone()),
            cluster: cluster.to_owned(),
            pending_max: PENDING_MAX,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        flags: NatsFlags,
    }

    fn read(args: &str) -> Result<NatsFlags, String> {
        let args = ["tandem"].into_iter().chain(args.split_whitespace());
        Command::try_parse_from(args).map(|command| command.flags).map_err(|error| error.to_string())
    }

    #[test]
    fn there_is_one_way_to_say_who_we_are_and_secrets_are_not_shown() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), "hidden\n").expect("ours");
        let from_file = format!("--nats-user u --nats-password-file {}", file.path().display());
        for (args, auth) in [
            ("", NatsAuth::None),
            ("--nats-user u --nats-password hidden", NatsAuth::User("u".to_owned(), "hidden".to_owned().into())),
            (&from_file, NatsAuth::User("u".to_owned(), "hidden".to_owned().into())),
            ("--nats-token hidden", NatsAuth::Token("hidden".to_owned().into())),
            ("--nats-creds f", NatsAuth::Credentials("f".into())),
            ("--nats-nkey f", NatsAuth::Nkey("f".into())),
        ] {
            let flags = read(&format!("--nats h:1,i:2 {args}")).expect("valid");
            let settings = flags.settings("c");
            assert_eq!((settings.servers.len(), &settings.auth), (2, &auth));
            let printed = toml::to_string(&flags).expect("plain values");
            assert!(!printed.contains("hidden") && !format!("{flags:?}").contains("hidden"), "{printed}");
        }
        for bad in [
            "--nats-token t",
            "--nats h:1 --nats-user u",
            "--nats h:1 --nats-password p",
            "--nats h:1 --nats-user u --nats-password-file /nonexistent",
            "--nats h:1 --nats-token t --nats-creds f",
            "--nats h:1 --nats-cert f",
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
