//! `tandem bench simulate`: simulates a cluster under the requests of a trace, or finds the smallest one that meets service levels.

use super::{ReportArgs, SloArgs, faults::FaultArgs, plan::PlanArgs, positive, progress::Bar};
use crate::{serve, settings::SimArgs, text_table::text_table};
use anyhow::{Context, Error, Result, ensure};
use clap::Args;
use std::{path::PathBuf, time::Duration};
use tandem_load::{
    report::{self, Fact, Report},
    trace::{Format, Trace, TraceError, TraceSettings},
};
use tandem_router::PrefillPlace;
use tandem_simulator::{Faults, Replay, RoutingRule, SimulatedCluster, SimulatedDevice, Size};

/// The default of `--prefill-chunk-budget`, in tokens.
pub(super) const CHUNK_BUDGET: u32 = 2_048;

/// The arguments of `tandem bench simulate`.
#[derive(Args, Debug)]
pub struct SimulateArgs {
    /// The trace: Mooncake's JSON lines (lengths and `hash_ids`)
    #[arg(value_name = "FILE")]
    pub trace: PathBuf,

    #[command(flatten)]
    requests: RequestArgs,
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    sim: SimArgs,
    #[command(flatten)]
    faults: FaultArgs,
    #[command(flatten)]
    slo: SloArgs,
    #[command(flatten)]
    plan: PlanArgs,
    #[command(flatten)]
    report: ReportArgs,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Requests")]
struct RequestArgs {
    /// Number of requests that are simulated [default: all]
    #[arg(long, value_name = "ROWS", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    /// Tokens of each block of `hash_ids`. The simulated caches have blocks of this size
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u64).range(1..=1_048_576))]
    block_tokens: u64,
    /// Open loop: requests arrive at their times in the trace, which runs this many times as fast [default: 1]
    #[arg(long, value_name = "FACTOR", value_parser = positive, conflicts_with = "concurrency")]
    speed: Option<f64>,
    /// Closed loop: keep this many requests in flight
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..), conflicts_with = "plan")]
    concurrency: Option<u32>,
    /// Ties between workers are broken by this number
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    seed: u64,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Cluster")]
struct ClusterArgs {
    /// Number of workers that prefill and generate [default: 8]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=65_536), conflicts_with_all = ["prefill_workers", "decode_workers", "plan"])]
    workers: Option<u32>,
    /// Number of workers that prefill for the decode workers
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=65_536), requires = "decode_workers", conflicts_with = "plan")]
    prefill_workers: Option<u32>,
    /// Number of workers that generate for the prefill workers
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=65_536), requires = "prefill_workers", conflicts_with = "plan")]
    decode_workers: Option<u32>,
    /// Rules that choose workers, separated by commas; several are compared
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "tandem")]
    policy: Vec<RoutingRule>,
    /// Where the policy `tandem` may prefill if there are prefill workers. The other ones always prefill there
    #[arg(long, value_enum, default_value_t)]
    prefill: PrefillPlace,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Device of each worker")]
struct DeviceArgs {
    /// KV memory in tokens: 64 GiB with the default size of a token's KV
    #[arg(long, value_name = "TOKENS", default_value_t = 524_288, value_parser = clap::value_parser!(u32).range(1..))]
    kv_capacity_tokens: u32,
    /// Prompt tokens computed in one step
    #[arg(long, value_name = "TOKENS", default_value_t = CHUNK_BUDGET, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    prefill_chunk_budget: u32,
    /// Sequences in one step
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    batch_max: u32,
}

impl SimulateArgs {
    fn cluster(&self) -> Result<SimulatedCluster> {
        let Self { requests, cluster, device, sim, .. } = self;
        let size = match (cluster.prefill_workers, cluster.decode_workers) {
            (Some(prefill), Some(decode)) => Size::Split { prefill: prefill as usize, decode: decode as usize },
            _ => Size::Mixed(cluster.workers.unwrap_or(8) as usize),
        };
        let time = |name: &str, ms: f64| {
            let time = Duration::try_from_secs_f64(ms / 1e3 / sim.sim_speedup);
            time.with_context(|| format!("--{name}: write a smaller number of milliseconds"))
        };
        let device = SimulatedDevice {
            prefill_tokens_per_second: sim.sim_prefill_tokens_per_second * sim.sim_speedup,
            prefill_step: time("sim-prefill-overhead-ms", sim.sim_prefill_overhead_ms)?,
            decode_step: time("sim-decode-step-ms", sim.sim_decode_step_ms)?,
            decode_sequence: time("sim-decode-per-sequence-ms", sim.sim_decode_per_sequence_ms)?,
            kv_bytes_per_token: sim.sim_kv_bytes_per_token,
            transfer_bytes_per_second: sim.sim_transfer_bytes_per_second * sim.sim_speedup,
            capacity_tokens: device.kv_capacity_tokens.into(),
            step_tokens: device.prefill_chunk_budget.into(),
            sequences_max: device.batch_max as usize,
        };
        self.faults.apply(SimulatedCluster {
            device,
            block_tokens: requests.block_tokens,
            prefill: cluster.prefill,
            concurrency: requests.concurrency.map(|concurrency| concurrency as usize),
            seed: requests.seed,
            ..SimulatedCluster::new(cluster.policy[0], size)
        })
    }
}

/// Simulates the trace and prints the report, the comparison of several policies, or the smallest cluster.
///
/// # Errors
/// The settings or the trace cannot be simulated, no cluster is large enough, or a report cannot be written.
pub fn run(args: SimulateArgs) -> Result<()> {
    let cluster = args.cluster()?;
    let slo = args.slo.levels();
    if args.plan.is_set() {
        ensure!(slo.is_set(), "--plan needs service levels: set --slo-ttft, --slo-itl or --slo-e2e");
        ensure!(
            cluster.policy == RoutingRule::Tandem && args.cluster.policy.len() == 1,
            "--plan needs --policy tandem, the rule that real routers have"
        );
    }
    args.report.check()?;
    let settings =
        TraceSettings { format: Some(Format::Mooncake), limit: args.requests.limit, block_tokens: args.requests.block_tokens };
    let trace = Trace::open(&args.trace, settings).map_err(|error| match error {
        TraceError::Row { .. } => Error::new(error).context(
            "the simulator reads Mooncake's format: a JSON object a line, with `input_length`, `output_length` and `hash_ids`",
        ),
        error => error.into(),
    })?;
    let title = format!("simulation of {}", trace.path().file_name().unwrap_or_default().to_string_lossy());
    let replay = Replay { trace: &trace, cluster, speed: args.requests.speed.unwrap_or(1.0), slo };
    if args.plan.is_set() {
        return args.plan.run(&replay, &title, &args.report);
    }
    let without = args.faults.is_set().then(|| undisturbed(&replay));
    let reports = compare(without.iter().chain([&replay]), &args.cluster.policy, &title)?;
    args.report.write(&title, None, &reports)
}

/// Returns the replay without faults.
fn undisturbed<'a>(replay: &Replay<'a>) -> Replay<'a> {
    let mut cluster = SimulatedCluster { faults: Faults::default(), ..replay.cluster.clone() };
    cluster.workers.iter_mut().for_each(|worker| worker.slower = 1.0);
    Replay { cluster, ..replay.clone() }
}

/// Runs the simulations with each policy, and prints the report or the comparison.
fn compare<'a>(
    simulations: impl Iterator<Item = &'a Replay<'a>> + Clone,
    policies: &[RoutingRule],
    title: &str,
) -> Result<Vec<Report>> {
    let (mut reports, mut disturbed) = (Vec::new(), String::new());
    let count = simulations.clone().count();
    for &policy in policies {
        for (at, replay) in simulations.clone().enumerate() {
            let bar = Bar::new(replay.trace.requests, policy.name());
            let replay = Replay { cluster: SimulatedCluster { policy, ..replay.cluster.clone() }, ..replay.clone() };
            let mut report = tandem_simulator::replay(&replay, &mut |state| bar.show(state))?;
            if at + 1 < count {
                report.name += ", no faults";
            } else if count > 1 {
                disturbed += &format!("{}: {}\n", report.name, counts(&report));
            }
            reports.push(report);
        }
    }
    let text = match &mut reports[..] {
        [only] => {
            title.clone_into(&mut only.name);
            report::text(only)
        }
        several => {
            let shared = |fact: &&Fact| several.iter().all(|report| report.facts.contains(fact));
            let facts = several[0].facts.iter().filter(shared).map(|fact| vec![fact.name.clone(), fact.value.clone()]);
            let table = report::comparison(several);
            format!("{title}\n\n{}\n{table}{}{disturbed}", text_table(facts, 2), if count > 1 { "\n" } else { "" })
        }
    };
    serve::print(&format!("{}\n", text.trim_end()))?;
    Ok(reports)
}

/// Returns the numbers of lost workers, resumed answers and retried prompts as text.
fn counts(report: &Report) -> String {
    let counts = report.facts.iter().filter(|fact| tandem_simulator::FAULT_FACTS.contains(&&*fact.name));
    let noun = |fact: &Fact| if fact.value == "1" { fact.name.trim_end_matches('s').to_owned() } else { fact.name.clone() };
    counts.map(|fact| format!("{} {}", fact.value, noun(fact))).collect::<Vec<_>>().join(", ")
}
