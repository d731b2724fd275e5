//! The command `tandem top`: a router's view of its workers, with one row for each worker, in a terminal or once as text.

mod screen;
mod table;

use crate::{
    running::{self, RunningCluster},
    server::{GRPC, HttpServer, ServerAddress, ServerPlace, TLS, kind, nothing_runs, running_at},
    settings::{ClusterTlsArgs, KeyArgs},
    terminal,
};
use anyhow::{Context, Error, Result, anyhow};
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use screen::{KeyAction, Screen};
use std::{
    io::{IsTerminal, stdin, stdout},
    time::Duration,
};
use table::{Column, SortOrder, TextTable};
use tandem_process::retry::error_chain;
use tandem_proto::{
    channel::{self, Channel, Network, PeerRole},
    v1::{WorkersReply, WorkersRequest, router_client::RouterClient},
};
use tokio::{
    runtime::Runtime,
    time::{Instant, timeout},
};
use tonic::Code;

/// Time limit for a reply. A healthy router answers within milliseconds.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// The maximum width of a table that is printed once, in columns: it can be read in a report or in half of a wide screen.
const PLAIN_WIDTH: usize = 120;

/// The arguments of `tandem top`.
#[derive(clap::Args, Debug)]
pub struct TopArgs {
    /// The router: a port of this machine, host:port, or a URL, of its --listen, or the frontend of a `tandem up` that you run [default: the
    /// `tandem up` that you run, or else 127.0.0.1:7000]
    #[arg(value_name = "SERVER")]
    router: Option<ServerAddress>,
    /// The cluster key.
    #[command(flatten)]
    key: KeyArgs,
    /// The certificate with the role `tool`.
    #[command(flatten)]
    cluster_tls: ClusterTlsArgs,
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

struct RouterConnection {
    runtime: Runtime,
    client: RouterClient<Channel>,
    address: ServerAddress,
    /// The message if no router answers.
    missing: String,
}

const WANTED: &str =
    "`tandem top` reads a router: write the port of its --listen, which is 7000 unless set; `tandem up` prints it";

const CERTIFICATE: &str = "for a router with a certificate, set --cluster-cert, --cluster-cert-key and --cluster-ca to the files tool.pem, \
                           tool.key and ca.pem that its `tandem cert` has made; otherwise write the port of a router's --listen";

struct WorkersView {
    at: Instant,
    reply: WorkersReply,
}

impl RouterConnection {
    /// Connects to the named router, to the router of this user's only running cluster, or to the default address. A running cluster's file
    /// has its key, which is used unless `--cluster-key-file` is given.
    fn open(args: &TopArgs) -> Result<Self> {
        let tls = args.cluster_tls.open(PeerRole::Tool, None)?;
        let folders = running::folders();
        let found = match &args.router {
            Some(address) => running_at(&folders, address),
            None => RunningCluster::only(&folders, "tandem top")?,
        };
        let key = match &found {
            Some(cluster) if args.key.cluster_key_file.is_none() => cluster.key.read()?,
            _ => args.key.read()?,
        };
        let is_default = found.is_none() && args.router.is_none();
        let address = match (found, &args.router) {
            (Some(cluster), _) => {
                // Waits for a cluster that starts. If the frontend does not answer, the router may.
                let _ = HttpServer::at(ServerPlace::of(&cluster)?)?.get("/ready");
                cluster.router.to_string().parse().expect("the address is valid")
            }
            (None, Some(address)) => address.clone(),
            (None, None) => "127.0.0.1:7000".parse().expect("the address is valid"),
        };
        let network = Network::tcp(key).with_tls(tls.map(|(tls, _)| tls));
        let router = Self::connect(&address, &network)?;
        Ok(if is_default { Self { missing: nothing_runs("router", &address), ..router } } else { router })
    }

    fn connect(address: &ServerAddress, network: &Network) -> Result<Self> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().context("the process cannot start threads")?;
        let endpoint = channel::endpoint(&address.host_port())?;
        let channel = {
            let _within = runtime.enter();
            network.expecting(&[PeerRole::Router]).connect_lazy(&endpoint)
        };
        let missing = format!("no router answers at {address}; {WANTED}");
        Ok(Self { runtime, client: RouterClient::new(channel), address: address.clone(), missing })
    }

    fn view(&mut self) -> Result<WorkersView> {
        let reply = self.runtime.block_on(async { timeout(REPLY_TIMEOUT, self.client.workers(WorkersRequest {})).await });
        let reply = match reply {
            Ok(reply) => reply,
            Err(late) => return Err(self.wrong_kind().unwrap_or_else(|| Error::new(late).context(self.missing.clone()))),
        };
        let reply = reply.map_err(|status| match status.code() {
            Code::Unauthenticated => anyhow!(
                "the process at {} refuses the call: {}; only its user has the key of a `tandem up` without --cluster-key-file",
                self.address,
                status.message()
            ),
            Code::Unimplemented if kind(&self.address) == Some(GRPC) => {
                anyhow!("{} is the gRPC port of a worker; {WANTED}", self.address)
            }
            _ => self.wrong_kind().unwrap_or_else(|| anyhow!("{}", status.message()).context(self.missing.clone())),
        })?;
        self.missing = format!("the router at {} does not answer any more", self.address);
        Ok(WorkersView { at: Instant::now(), reply: reply.into_inner() })
    }

    /// Returns the error for an address at which no router answers this call; `None` if nothing answers at it.
    fn wrong_kind(&self) -> Option<Error> {
        let kind = kind(&self.address)?;
        Some(anyhow!("{} is {kind}; {}", self.address, if kind == TLS { CERTIFICATE } else { WANTED }))
    }
}

/// Shows the view until the user quits, and returns `None`. Without a terminal, or with `--once`, returns one table as text.
///
/// # Errors
/// Fails if the cluster key cannot be read, if the router does not answer, or if the terminal cannot be used.
pub fn run(args: TopArgs) -> Result<Option<String>> {
    let mut router = RouterConnection::open(&args)?;
    let interval = Duration::from_secs_f64(args.interval);
    let mut screen = Screen::new(SortOrder { by: args.sort, reverse: args.reverse });
    let before = router.view()?;
    if args.once || !stdout().is_terminal() || !stdin().is_terminal() {
        std::thread::sleep(interval);
        let now = router.view()?;
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
            match router.view() {
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
