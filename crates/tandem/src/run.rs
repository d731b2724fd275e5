//! Runs the subcommand of a command line.

#[cfg(feature = "chat")]
use crate::chat;
#[cfg(feature = "model")]
use crate::model;
#[cfg(feature = "top")]
use crate::top;
use crate::{
    Cluster, Process, ServedProcess, StartError, audit, cert,
    cli::{AuditCommand, Cli, Command, RouteCommand, Serve},
    explain, key, ready, running,
    serve::{self, print, printable},
    settings::CommonArgs,
    text_table::counted,
    why, workers,
};
#[cfg(feature = "load")]
use crate::{bench, cli::BenchCommand};
use anyhow::Context;
use std::time::Duration;
use tandem_process::telemetry::tell;

/// Runs the subcommand until it ends, a serving role until it is stopped. Not generic, so that it is compiled with the library, not with the binary.
///
/// # Errors
/// The subcommand fails; the message says what to do.
pub fn run(cli: Cli) -> anyhow::Result<()> {
    name_unknown_variables(&cli.command);
    match cli.command {
        Command::Up(up) => {
            let delay = up.role.frontend.drain_delay;
            let start = async |role| Cluster::start_found_in(role, &running::folders()).await;
            return run_or_print("up", *up, |role| &role.common, delay, start);
        }
        Command::Router(router) => return run_or_print("router", *router, |role| &role.common, 0, Process::router),
        Command::PrefillWorker(worker) => {
            return run_or_print("prefill-worker", *worker, |role| &role.common, 0, Process::prefill_worker);
        }
        Command::DecodeWorker(worker) => {
            return run_or_print("decode-worker", *worker, |role| &role.common, 0, Process::decode_worker);
        }
        Command::Frontend(frontend) => {
            let delay = frontend.role.frontend.drain_delay;
            return run_or_print("frontend", *frontend, |role| &role.common, delay, Process::frontend);
        }
        Command::Epp(epp) if epp.role.external.engine_url.is_empty() => {
            let delay = epp.role.frontend.frontend.drain_delay;
            return run_or_print("epp", *epp, |role| &role.frontend.common, delay, |role| Process::frontend(role.alone()));
        }
        Command::Epp(epp) => {
            let delay = epp.role.frontend.frontend.drain_delay;
            return run_or_print("epp", *epp, |role| &role.frontend.common, delay, |role| Cluster::start(role.with_workers()));
        }
        #[cfg(feature = "model")]
        Command::Model { command } => print(&model::run(command)?)?,
        Command::Completions { shell } => print(&Cli::completions(shell))?,
        Command::Man { folder } => {
            Cli::write_man_pages(&folder).with_context(|| format!("man pages cannot be written to {}", folder.display()))?;
        }
        #[cfg(feature = "load")]
        Command::Bench { command: BenchCommand::Replay(args) } => bench::replay(*args)?,
        #[cfg(feature = "load")]
        Command::Bench { command: BenchCommand::Simulate(args) } => bench::simulate(*args)?,
        #[cfg(feature = "load")]
        Command::Bench { command: BenchCommand::Rates(args) } => bench::rates(&args)?,
        #[cfg(feature = "top")]
        Command::Top(args) => {
            if let Some(table) = top::run(args)? {
                print(&table)?;
            }
        }
        #[cfg(feature = "chat")]
        Command::Chat(args) => chat::run(args)?,
        Command::Cert(args) => print(&cert::run(&args)?)?,
        Command::Key { command } => print(&key::run(command)?)?,
        Command::Ready(server) => ready::check(&server)?,
        Command::Route { command: RouteCommand::Explain(args) } => print(&explain::run(args)?)?,
        Command::Plan(args) => print(&workers::plan(&args)?)?,
        Command::Drain(args) => print(&workers::drain(&args)?)?,
        Command::Why(args) => print(&why::run(&args)?)?,
        Command::Audit { command } => audit(command)?,
    }
    Ok(())
}

/// Returns the environment variables that only look like settings.
fn unknown_variables() -> Vec<String> {
    Cli::unknown_variables(std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()))
}

/// Says which environment variables are ignored, if the command does not log this.
fn name_unknown_variables(command: &Command) {
    let unknown = unknown_variables();
    if !unknown.is_empty() && !command.logs() {
        print_error(&format!("{}: {}", unknown.join(", "), serve::UNKNOWN_VARIABLES));
    }
}

fn audit(command: AuditCommand) -> anyhow::Result<()> {
    match command {
        AuditCommand::Report { ledger, json, csv } => {
            let report = audit::report(&audit::read(&[], &ledger, &[])?.ledger)?;
            print(&match (json, csv) {
                (true, _) => report.json(),
                (_, true) => report.csv(),
                (false, false) => report.table(),
            })?;
            if let Some(note) = report.note() {
                print_error(&note);
            }
        }
        AuditCommand::Check { servers, client, ledger, metrics, ca, lost_workers, lost_frontend, result } => {
            let mut evidence = audit::read(&client, &ledger, &metrics)?;
            for server in servers {
                evidence.metrics.add(&audit::metrics_of(server, ca.as_deref())?);
            }
            evidence.lost_workers.extend(lost_workers);
            evidence.lost_frontend = lost_frontend;
            let (checked, findings) = audit::check(&evidence);
            findings.iter().try_for_each(|finding| print(&format!("{finding}\n")))?;
            let audit::Checked { answers, estimates, attempts, workers, unverified } = checked;
            print(&format!(
                "{answers} answers ({estimates} of them estimates, {unverified} counted by killed workers only), {attempts} attempts, {workers} workers\n"
            ))?;
            if let Some(path) = result {
                let written = checked.result(findings.len()).now().write(&path);
                written.with_context(|| format!("--result {} cannot be written", path.display()))?;
            }
            anyhow::ensure!(
                findings.is_empty(),
                "{}: usage, ledgers and metrics do not reconcile; the list is above",
                counted(findings.len(), "finding")
            );
        }
    }
    Ok(())
}

fn run_or_print<R, S, F>(
    role: &str,
    command: Serve<R>,
    common: fn(&R) -> &CommonArgs,
    delay_s: u32,
    start: impl FnOnce(R) -> F,
) -> anyhow::Result<()>
where
    R: clap::Args + serde::Serialize,
    S: ServedProcess,
    F: Future<Output = Result<S, StartError>>,
{
    if command.print_config {
        return print(&command.to_toml());
    }
    let changed = command.changed(role);
    let CommonArgs { telemetry, grace_period, .. } = common(&command.role).clone();
    let (delay, grace) = (Duration::from_secs(delay_s.into()), Duration::from_secs(grace_period));
    serve::run(&telemetry, (delay, grace), &changed, &unknown_variables(), start(command.role))
}

/// Writes one line about a failure or an incomplete result to stderr.
pub fn print_error(failure: &str) {
    tell(std::io::stderr(), &format!("tandem: {}\n", printable(&failure.replace('\n', " "))));
}
