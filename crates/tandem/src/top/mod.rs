//! The command `tandem top`: a router's view of its workers, with one row for each worker, in a terminal or once as text.

mod screen;
mod table;

use crate::{
    router_connection::{RouterAddress, RouterConnection},
    terminal,
};
use anyhow::{Context, Result};
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use screen::{KeyAction, Screen};
use std::{
    io::{IsTerminal, stdin, stdout},
    time::Duration,
};
use table::{Column, SortOrder, TextTable};
use tandem_process::retry::error_chain;
use tandem_proto::v1::WorkersReply;
use tokio::time::Instant;

/// The maximum width of a table that is printed once, in columns: it can be read in a report or in half of a wide screen.
const PLAIN_WIDTH: usize = 120;

/// The arguments of `tandem top`.
#[derive(clap::Args, Debug)]
pub struct TopArgs {
    /// The router.
    #[command(flatten)]
    router: RouterAddress,
    /// Seconds between two views; rates are taken over this time
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = interval)]
    interval: f64,
    /// Column to sort by; in a terminal, the arrow keys choose another
    #[arg(long, value_enum, default_value_t)]
    sort: Column,
    /// Sort in descending order
    #[arg(long)]
    reverse: bool,
    /// Print one table after one interval and exit; without a terminal this is the default
    #[arg(long)]
    once: bool,
}

fn interval(text: &str) -> Result<f64, &'static str> {
    text.parse().ok().filter(|seconds| (0.1..=3600.0).contains(seconds)).ok_or("write a number from 0.1 to 3600")
}

/// A router's view of the cluster, and when it was read.
struct WorkersView {
    at: Instant,
    reply: WorkersReply,
}

impl WorkersView {
    fn read(router: &mut RouterConnection) -> Result<Self> {
        let reply = router.view()?;
        Ok(Self { at: Instant::now(), reply })
    }
}

/// Shows the view until the user quits, and returns `None`. Without a terminal, or with `--once`, returns one table as text.
///
/// # Errors
/// Fails if the cluster key cannot be read, if the router does not answer, or if the terminal cannot be used.
pub fn run(args: TopArgs) -> Result<Option<String>> {
    let mut router = args.router.open("tandem top")?;
    let interval = Duration::from_secs_f64(args.interval);
    let mut screen = Screen::new(SortOrder { by: args.sort, reverse: args.reverse });
    let before = WorkersView::read(&mut router)?;
    if args.once || !stdout().is_terminal() || !stdin().is_terminal() {
        std::thread::sleep(interval);
        let now = WorkersView::read(&mut router)?;
        let table = screen.sorted(TextTable::new(&now.reply, &before.reply, now.at - before.at));
        return Ok(Some(table.plain(terminal::width().map_or(PLAIN_WIDTH, |width| width.min(PLAIN_WIDTH)), args.sort)));
    }
    let mut terminal = ratatui::try_init().context("cannot draw on this terminal; set --once to print a plain table")?;
    let shown = (|| -> Result<()> {
        let (mut before, mut now) = (None, before);
        let mut problem: Option<String> = None;
        loop {
            let stale = problem.as_deref().map(|problem| (problem, now.at.elapsed()));
            let earlier = before.as_ref().unwrap_or(&now);
            let table = screen.sorted(TextTable::new(&now.reply, &earlier.reply, now.at - earlier.at));
            terminal.draw(|frame| screen.draw(frame, &table, stale))?;
            let due = Instant::now() + interval;
            loop {
                let left = due.saturating_duration_since(Instant::now());
                if !event::poll(left)? {
                    break;
                }
                match event::read()? {
                    Event::Key(key) if key.kind == KeyEventKind::Press => match screen.press(key) {
                        KeyAction::Quit => return Ok(()),
                        KeyAction::Continue => {}
                    },
                    Event::Resize(..) => {}
                    _ => continue,
                }
                let table = screen.sorted(table.clone());
                terminal.draw(|frame| screen.draw(frame, &table, stale))?;
            }
            match WorkersView::read(&mut router) {
                Ok(view) => {
                    before = Some(std::mem::replace(&mut now, view));
                    problem = None;
                }
                // If the router does not answer, the last view stays on the screen with its age and the error.
                Err(error) => problem = Some(error_chain(error.as_ref())),
            }
        }
    })();
    ratatui::restore();
    shown.map(|()| None)
}
