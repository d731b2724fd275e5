//! Settings of frontends.

use super::{LimitArgs, ParserArgs, PassthroughArgs, RestartArgs, TenantArgs, common::with_commas};
use crate::files::{self, Connections};
use clap::Args;
use serde::Serialize;
use std::{fmt, path::PathBuf, str::FromStr, time::Duration};
use tandem_frontend::{FrontendSettings, Renderer};
use tandem_model_store::ModelSource;
use tandem_process::Secret;
use tandem_text::ServedModel;

/// The settings of `tandem up` and of frontends.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[command(next_help_heading = "Frontend")]
#[serde(rename_all = "kebab-case")]
pub struct FrontendArgs {
    /// A further model that the frontend serves: clients send ID as `model`, and MODEL is as in --model. Repeat the flag, or separate models by
    /// commas. Each model needs workers of its own, with --served-model-name ID
    #[arg(
        long = "extra-model",
        env = "TANDEM_EXTRA_MODEL",
        value_name = "ID=MODEL",
        value_delimiter = ',',
        help_heading = "Model"
    )]
    #[serde(rename = "extra-model", serialize_with = "with_commas")]
    pub extra_models: Vec<ExtraModel>,

    /// Parsers of the models' answers.
    #[command(flatten)]
    #[serde(flatten)]
    pub parsers: ParserArgs,

    /// vLLM server that converts chats with images to tokens: any server with --enable-scale-out, or `vllm launch render`. With `MODEL=`, it does so
    /// only for that model. Repeat the flag, or separate several by commas [default: `tandem up --engine vllm` uses its servers; else none, and
    /// chats with images are refused]
    #[arg(long = "renderer", env = "TANDEM_RENDERER", value_name = "[MODEL=]URL", value_delimiter = ',')]
    #[serde(rename = "renderer", serialize_with = "with_commas")]
    pub renderers: Vec<String>,

    /// File with the renderers' --api-key; read again for each call
    #[arg(long, env = "TANDEM_RENDERER_KEY_FILE", value_name = "FILE", value_parser = Secret::of_argument, requires = "renderers")]
    #[serde(skip)]
    pub renderer_key_file: Option<Secret>,

    /// How often one answer may resume on another worker after its worker was lost; 0: the answer ends with an error event. An answer that
    /// fails more often than the default is probably itself the reason that workers fail
    #[arg(long, env = "TANDEM_RESUMES", value_name = "N", default_value_t = 8)]
    pub resumes: u32,

    /// Number of recent requests that /dashboard shows, with token counts, workers and times but never their text; each takes a few KiB of
    /// memory. 0 turns the page off
    #[arg(long, env = "TANDEM_DASHBOARD_REQUESTS", value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(0..=4_096))]
    pub dashboard_requests: u32,

    /// File written by `tandem audit check --result FILE`; /dashboard and /metrics show its content [default: none]
    #[arg(long, env = "TANDEM_AUDIT_RESULT", value_name = "FILE")]
    pub audit_result: Option<PathBuf>,

    /// How long the frontend still accepts connections and requests after SIGTERM, SIGHUP or Ctrl-C, in seconds, while /ready answers 503. Then it drains. Set it
    /// to the time in which load balancers notice that, if nothing else delays SIGTERM
    #[arg(long, env = "TANDEM_DRAIN_DELAY", value_name = "SECONDS", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=3_600))]
    pub drain_delay: u32,

    /// Models of other servers.
    #[command(flatten)]
    #[serde(flatten)]
    pub passthrough: PassthroughArgs,

    /// Limits on clients.
    #[command(flatten)]
    #[serde(flatten)]
    pub limits: LimitArgs,

    /// Accounts and trusted proxies.
    #[command(flatten)]
    #[serde(flatten)]
    pub tenants: TenantArgs,
}

impl FrontendArgs {
    /// Returns the settings of a frontend with these flags that serves `model`, and of whose requests at most `sequences_max` run at a time.
    pub(crate) fn settings(self, model: ServedModel, restart: &RestartArgs, sequences_max: u32) -> FrontendSettings {
        let Self { limits, tenants, .. } = self;
        let connections = Connections { all: limits.max_connections, per_address: limits.max_connections_per_address };
        let connections = files::within_limit(connections);
        FrontendSettings {
            renderers: self.renderers.iter().map(|text| renderer(text, self.renderer_key_file.as_ref())).collect(),
            cors_origins: tenants.cors_origin.clone(),
            concurrent_sequences: sequences_max as usize,
            sequences_per_client: limits.sequences_per_client(sequences_max),
            max_wait: limits.max_wait(),
            body_max_bytes: limits.max_body_bytes,
            bodies_max_bytes: limits.max_bodies_bytes,
            encoding_cache_bytes: limits.encoding_cache_bytes,
            connections_max: connections.all as usize,
            connections_per_address_max: connections.per_address as usize,
            hosts: limits.hosts.hosts(),
            router_wait: Duration::from_secs(restart.router_wait.into()),
            drain_idle: Duration::from_secs(restart.drain_idle.into()),
            shares_port: restart.reuse_port,
            resumes: self.resumes,
            dashboard_requests: self.dashboard_requests as usize,
            audit_result: self.audit_result,
            account_header: tenants.account_header.as_deref().map(|name| name.parse().expect("clap has checked the flag")),
            cache_isolation: tenants.isolation(),
            trusted_proxies: tenants.trusted_proxies,
            expose_details: tenants.expose_details,
            ..FrontendSettings::new("", model)
        }
    }
}

/// Returns the renderer that `[MODEL=]URL` stands for.
fn renderer(text: &str, key: Option<&Secret>) -> Renderer {
    let of_model = text.split_once('=').filter(|(model, _)| !model.contains("://"));
    let (models, url) = of_model.map_or((Vec::new(), text), |(model, url)| (vec![model.to_owned()], url));
    Renderer { models, url: url.to_owned(), key: key.cloned(), ca: None }
}

/// A model that a frontend serves besides that of `--model`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtraModel {
    /// The id that clients send as `model`.
    pub id: String,
    /// Where its tokenizer and chat template come from.
    pub source: ModelSource,
}

impl FromStr for ExtraModel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('=').filter(|(id, _)| !id.is_empty());
        let (id, source) = parts.ok_or("write ID=MODEL, such as small=hf:ORG/NAME")?;
        let source = source.parse().map_err(|error: tandem_model_store::InvalidSource| error.to_string())?;
        Ok(Self { id: id.to_owned(), source })
    }
}

impl fmt::Display for ExtraModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.id, self.source)
    }
}
