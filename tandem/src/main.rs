//! The binary: reads the command line, runs what it asks for, and turns the end into an exit code.
//!
//! 0: done. 1: failed, with one line on stderr that says what to do. 2: the command line or a setting is wrong.

use anyhow::Context;
use std::{ffi::OsStr, process::ExitCode};
use tandem::{
    Cluster, Process, StartError, audit, explain,
    model::Store,
    ready,
    serve::{self, Served},
    settings::{AuditCommand, Cli, Command, ModelCommand, Own, RouteCommand, Serve},
    top,
};

fn main() -> ExitCode {
    let cli = match Cli::read(std::env::args_os().collect(), |name: &OsStr| std::env::var_os(name)) {
        Ok(cli) => cli,
        Err(error) => error.exit(),
    };
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tell(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<()> {
    match cli.command {
        Command::Up(up) => return run_or_print(*up, |up| Cluster::start(up.settings)),
        Command::Router(router) => return run_or_print(*router, Process::router),
        Command::PrefillWorker(worker) => return run_or_print(*worker, Process::prefill_worker),
        Command::DecodeWorker(worker) => return run_or_print(*worker, Process::decode_worker),
        Command::Frontend(frontend) => return run_or_print(*frontend, Process::frontend),
        Command::Model { command: ModelCommand::Fetch { source, store } } => {
            let store = Store::new(store)?;
            let model = store.get(&source)?;
            // Computing the revision here stores it, so that serving processes need not compute it.
            print(&format!("revision {}\n{}\n", store.revision(&model)?, model.path.display()));
        }
        Command::Model { command: ModelCommand::List { store } } => {
            for model in Store::new(store)?.list()? {
                print(&format!("{}\t{:.1} MB\t{}\n", model.id, model.bytes as f64 / 1e6, model.path.display()));
            }
        }
        Command::Top(args) => {
            if let Some(table) = top::run(args)? {
                print(&table);
            }
        }
        Command::Ready { address } => ready::check(&address)?,
        Command::Route { command: RouteCommand::Explain(args) } => print(&explain::run(args)?),
        Command::Audit { command: AuditCommand::Report { ledger, json, csv } } => {
            let report = audit::report(&audit::read(&[], &ledger, &[])?.ledger)?;
            let format = if json {
                audit::Format::Json
            } else if csv {
                audit::Format::Csv
            } else {
                audit::Format::Table
            };
            print(&report.print(format));
            if let Some(note) = report.note() {
                tell(&note);
            }
        }
        Command::Audit { command: AuditCommand::Check { client, ledger, metrics, lost_workers, lost_frontend, result } } => {
            let mut evidence = audit::read(&client, &ledger, &metrics)?;
            evidence.lost_workers.extend(lost_workers);
            evidence.lost_frontend = lost_frontend;
            let (checked, findings) = audit::check(&evidence);
            findings.iter().for_each(|finding| print(&format!("{finding}\n")));
            let audit::Checked { answers, estimates, attempts, workers, unverified } = checked;
            print(&format!(
                "{answers} answers ({estimates} of them estimates, {unverified} known to killed workers only), {attempts} attempts, {workers} workers\n"
            ));
            if let Some(path) = result {
                let written = checked.result(findings.len()).now().write(&path);
                written.with_context(|| format!("--result {} cannot be written", path.display()))?;
            }
            anyhow::ensure!(findings.is_empty(), "{} things do not reconcile; they are listed above", findings.len());
        }
    }
    Ok(())
}

/// Serves what `start` starts, unless only the settings are asked for.
fn run_or_print<F: Own, S: Served, R>(command: Serve<F>, start: impl FnOnce(Serve<F>) -> R) -> anyhow::Result<()>
where
    R: Future<Output = Result<S, StartError>>,
{
    let settings = command.to_toml();
    if command.print_config {
        print(&settings);
        return Ok(());
    }
    let (telemetry, grace) = (command.settings.telemetry.clone(), command.settings.grace());
    serve::run(&telemetry, grace, &settings, start(command))
}

#[expect(clippy::print_stdout, reason = "what the user asked for")]
fn print(text: &str) {
    print!("{text}");
}

#[expect(clippy::print_stderr, reason = "one line, beside what was asked for")]
fn tell(failure: &str) {
    eprintln!("tandem: {}", failure.replace('\n', " "));
}
