//! Settings of models whose requests a frontend passes through to other servers.

use super::common::with_commas;
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;
use tandem_process::Secret;

/// The servers to which a frontend passes requests through.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize)]
#[command(next_help_heading = "Pass-through")]
#[serde(rename_all = "kebab-case")]
pub struct PassthroughArgs {
    /// Passes requests for MODEL (embeddings, rerank, score, classify, pooling, transcriptions and translations) through to the servers at
    /// these URLs, such as `vllm serve --runner pooling`: unchanged, and not routed by KV. Repeat the flag, or separate models by commas
    #[arg(long, env = "TANDEM_PASSTHROUGH", value_name = "MODEL=URL[,URL]", value_delimiter = ',', value_parser = server)]
    #[serde(serialize_with = "with_commas")]
    pub passthrough: Vec<String>,

    /// File with the --api-key of the servers in --passthrough; read again when it changes
    #[arg(long, env = "TANDEM_PASSTHROUGH_KEY_FILE", value_name = "FILE", value_parser = Secret::of_argument)]
    #[serde(skip)]
    pub passthrough_key_file: Option<Secret>,

    /// CA certificate (PEM) for verifying https:// servers in --passthrough, besides the public ones
    #[arg(long, env = "TANDEM_PASSTHROUGH_CA", value_name = "FILE")]
    pub passthrough_ca: Option<PathBuf>,
}

impl PassthroughArgs {
    /// Returns each server's URL with its model.
    pub(crate) fn servers(&self) -> Vec<(String, String)> {
        let mut last = "";
        let mut servers = Vec::new();
        for (model, url) in self.passthrough.iter().map(|item| split(item)) {
            last = model.unwrap_or(last);
            servers.push((last.to_owned(), url.to_owned()));
        }
        servers
    }
}

/// Splits an item of `--passthrough` into model and URL. An item without a model has that of the item before it.
fn split(item: &str) -> (Option<&str>, &str) {
    // An id may have `=`, a scheme has none.
    let scheme = &item[..item.find("://").unwrap_or(0)];
    scheme.rfind('=').map_or((None, item), |at| (Some(&item[..at]), &item[at + 1..]))
}

fn server(item: &str) -> Result<String, &'static str> {
    let (model, url) = split(item);
    let is_url = (url.starts_with("http://") || url.starts_with("https://")) && !url.contains('@');
    (is_url && model != Some(""))
        .then(|| item.to_owned())
        .ok_or("write MODEL=URL, such as embedder=http://127.0.0.1:8100; the servers' key belongs in --passthrough-key-file")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use std::ffi::OsString;

    fn read(args: &[&str]) -> Result<PassthroughArgs, String> {
        let args = ["tandem", "up"].iter().chain(args).map(OsString::from).collect();
        match Cli::read(args, None).map_err(|error| error.to_string())?.command {
            Command::Up(up) => Ok(up.role.frontend.passthrough),
            other => unreachable!("the command is up: {other:?}"),
        }
    }

    #[test]
    fn flag_is_repeated_or_has_several_models_and_needs_a_model_first() {
        let repeated =
            read(&["--passthrough", "a=http://x,http://y", "--passthrough", "b=http://z"]).expect("the flags are valid");
        assert_eq!(repeated, read(&["--passthrough", "a=http://x,http://y,b=http://z"]).expect("the flag is valid"));
        let printed = toml::to_string(&repeated).expect("the settings can be serialized");
        assert_eq!(printed, "passthrough = \"a=http://x,http://y,b=http://z\"\n");
        let error = read(&["--passthrough", "http://x,a=http://y"]).expect_err("the first URL has no model");
        assert!(error.contains("write the model's id before it"), "{error}");
        let error = read(&["--passthrough-ca", "ca.pem"]).expect_err("there are no servers");
        assert!(error.contains("--passthrough-ca needs --passthrough"), "{error}");
    }

    #[test]
    fn servers_belong_to_the_model_before_them() {
        let args = read(&["--passthrough", "a=b=http://x:1,https://y,c=http://[::1]:2/base"]).expect("the flag is valid");
        let pair = |model: &str, url: &str| (model.to_owned(), url.to_owned());
        assert_eq!(args.servers(), [pair("a=b", "http://x:1"), pair("a=b", "https://y"), pair("c", "http://[::1]:2/base")]);
        for wrong in ["", "a", "a=b", "a=x:1", "a=ftp://x", "=http://x", "a=http://user:secret@x"] {
            assert!(read(&["--passthrough", wrong]).is_err_and(|error| error.contains("write MODEL=URL")), "{wrong}");
        }
    }
}
