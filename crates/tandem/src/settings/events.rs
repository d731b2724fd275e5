//! Settings of NATS, which carries KV events in place of the workers' own streams.

use super::common::with_commas;
use crate::secrets::path;
use clap::Args;
use serde::{Serialize, Serializer};
use std::path::PathBuf;
use tandem_process::{
    Metrics, Secret,
    events::{Broker, NatsAuth, NatsError, NatsSettings, without_password},
};
use tandem_proto::ClusterKey;

/// The number of messages of each worker that a router buffers; see [`NatsSettings::pending_max`].
const PENDING_MAX: usize = 1_024;

/// Serializes the servers' addresses without passwords, because the settings are logged before addresses with passwords are refused.
fn without_passwords<S: Serializer>(servers: &[String], serializer: S) -> Result<S::Ok, S::Error> {
    with_commas(&servers.iter().map(|server| without_password(server)).collect::<Vec<_>>(), serializer)
}

/// The NATS settings of a router or worker.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[command(next_help_heading = "KV events over NATS")]
#[serde(rename_all = "kebab-case")]
pub struct NatsArgs {
    /// host:port of the NATS servers, separated by commas. Workers publish KV events there once for all routers [default: each worker
    /// streams its events to each router]
    #[arg(long, env = "TANDEM_NATS", value_name = "ADDRESSES", value_delimiter = ',')]
    #[serde(serialize_with = "without_passwords")]
    pub nats: Vec<String>,

    /// NATS user name; needs a password
    #[arg(long, env = "TANDEM_NATS_USER", value_name = "NAME")]
    pub nats_user: Option<String>,

    /// NATS password. Set it in the environment or in a file: flags show in the list of processes
    #[arg(long, env = "TANDEM_NATS_PASSWORD", value_name = "PASSWORD", hide_env_values = true)]
    #[serde(skip)]
    pub nats_password: Option<Secret>,

    /// File with the NATS password, read again for each connection
    #[arg(long, env = "TANDEM_NATS_PASSWORD_FILE", value_name = "FILE", value_parser = Secret::of_argument)]
    #[serde(skip)]
    pub nats_password_file: Option<Secret>,

    /// NATS token, in place of a user
    #[arg(long, env = "TANDEM_NATS_TOKEN", value_name = "TOKEN", hide_env_values = true)]
    #[serde(skip)]
    pub nats_token: Option<Secret>,

    /// NATS credentials file (a JWT and its seed, as `nsc` writes it), in place of a user; read again for each connection
    #[arg(long, env = "TANDEM_NATS_CREDS", value_name = "FILE", value_parser = Secret::of_argument)]
    #[serde(serialize_with = "path")]
    pub nats_creds: Option<Secret>,

    /// File with the seed of an nkey, in place of a user; read again for each connection
    #[arg(long, env = "TANDEM_NATS_NKEY", value_name = "FILE", value_parser = Secret::of_argument)]
    #[serde(serialize_with = "path")]
    pub nats_nkey: Option<Secret>,

    /// CA certificate (PEM) for verifying NATS; turns on TLS, even if the servers do not require it
    #[arg(long, env = "TANDEM_NATS_CA", value_name = "FILE")]
    pub nats_ca: Option<PathBuf>,

    /// Client certificate (PEM) for NATS; needs --nats-key
    #[arg(long, env = "TANDEM_NATS_CERT", value_name = "FILE")]
    pub nats_cert: Option<PathBuf>,

    /// Private key (PEM) of the client certificate for NATS
    #[arg(long, env = "TANDEM_NATS_KEY", value_name = "FILE")]
    pub nats_key: Option<PathBuf>,
}

impl NatsArgs {
    /// Opens the NATS connection of a process that belongs to the cluster `cluster`; `None` if no server is set. The servers need not run
    /// yet.
    ///
    /// # Errors
    /// An address or a file cannot be used.
    pub async fn broker(&self, cluster: &str, key: ClusterKey, metrics: &Metrics) -> Result<Option<Broker>, NatsError> {
        if self.nats.is_empty() {
            return Ok(None);
        }
        Broker::open(&self.settings(cluster), key, metrics).await.map(Some)
    }

    fn settings(&self, cluster: &str) -> NatsSettings {
        let auth = match (self.nats_user.clone().zip(self.password().cloned()), self.clone()) {
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

    fn password(&self) -> Option<&Secret> {
        self.nats_password.as_ref().or(self.nats_password_file.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use std::ffi::OsString;

    fn read(args: &str) -> Result<NatsArgs, String> {
        let args = ["tandem", "router"].into_iter().chain(args.split_whitespace()).map(OsString::from).collect();
        match Cli::read(args, None).map_err(|error| error.to_string())?.command {
            Command::Router(router) => Ok(router.role.process.events),
            other => unreachable!("the command is router: {other:?}"),
        }
    }

    #[test]
    fn at_most_one_kind_of_nats_authentication_is_accepted_and_secrets_are_not_shown() {
        let file = tempfile::NamedTempFile::new().expect("the system can create a temporary file");
        std::fs::write(file.path(), "hidden\n").expect("the folder is writable");
        let with_file = |flags: &str| format!("{flags} {}", file.path().display());
        let from_file = with_file("--nats-user u --nats-password-file");
        for (args, auth) in [
            ("", NatsAuth::None),
            ("--nats-user u --nats-password hidden", NatsAuth::User("u".to_owned(), "hidden".to_owned().into())),
            (&from_file, NatsAuth::User("u".to_owned(), "hidden".to_owned().into())),
            ("--nats-token hidden", NatsAuth::Token("hidden".to_owned().into())),
            (&with_file("--nats-creds"), NatsAuth::Credentials("hidden".to_owned().into())),
            (&with_file("--nats-nkey"), NatsAuth::Nkey("hidden".to_owned().into())),
        ] {
            let flags = read(&format!("--nats h:1,i:2 {args}")).expect("the settings are valid");
            let settings = flags.settings("c");
            assert_eq!((settings.servers.len(), &settings.auth), (2, &auth));
            let printed = toml::to_string(&flags).expect("the settings can be serialized");
            assert!(!printed.contains("hidden") && !format!("{flags:?}").contains("hidden"), "{printed}");
            let is_path = args.starts_with("--nats-creds") || args.starts_with("--nats-nkey");
            assert_eq!(printed.contains(&file.path().display().to_string()), is_path, "{printed}");
        }
        for bad in [
            "--nats-token t",
            "--nats h:1 --nats-user u",
            "--nats h:1 --nats-password p",
            "--nats h:1 --nats-user u --nats-password-file /nonexistent",
            "--nats h:1 --nats-creds /nonexistent",
            "--nats h:1 --nats-nkey /nonexistent",
            &with_file("--nats h:1 --nats-token t --nats-creds"),
            "--nats h:1 --nats-cert f",
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
