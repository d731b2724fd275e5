//! The binary: reads the command line, runs what it asks for, and turns the end into an exit code.
//!
//! 0: done. 1: failed, with one line on stderr that says what to do. 2: the command line or a setting is wrong.

use std::{ffi::OsStr, process::ExitCode};
use tandem::{
    model::Store,
    settings::{Cli, Command, ModelCommand},
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
        Command::Up(up) if up.print_config => print(&up.settings.to_toml()),
        Command::Up(up) => return tandem::up::run(up.settings),
        Command::Model { command: ModelCommand::Fetch { source, store } } => {
            let model = Store::new(store)?.get(&source)?;
            print(&format!("{}\n", model.path.display()));
        }
        Command::Model { command: ModelCommand::List { store } } => {
            for model in Store::new(store)?.list()? {
                print(&format!("{}\t{:.1} MB\t{}\n", model.id, model.bytes as f64 / 1e6, model.path.display()));
            }
        }
    }
    Ok(())
}

#[expect(clippy::print_stdout, reason = "what the user asked for")]
fn print(text: &str) {
    print!("{text}");
}

#[expect(clippy::print_stderr, reason = "the one line of a failure")]
fn tell(failure: &str) {
    eprintln!("tandem: {}", failure.replace('\n', " "));
}
