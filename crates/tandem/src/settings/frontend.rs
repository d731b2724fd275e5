//! Settings of frontends.

use super::{LimitArgs, ParserArgs, TenantArgs, common::with_commas};
use crate::model::ModelSource;
use clap::Args;
use serde::Serialize;
use std::{fmt, path::PathBuf, str::FromStr};

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

    /// Limits on clients.
    #[command(flatten)]
    #[serde(flatten)]
    pub limits: LimitArgs,

    /// Accounts and trusted proxies.
    #[command(flatten)]
    #[serde(flatten)]
    pub tenants: TenantArgs,
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
        let source = source.parse().map_err(|error: crate::model::InvalidSource| error.to_string())?;
        Ok(Self { id: id.to_owned(), source })
    }
}

impl fmt::Display for ExtraModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.id, self.source)
    }
}
