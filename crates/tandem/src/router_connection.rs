//! The connection of a command to a router, whose view of the cluster it reads.

use crate::{
    running::{self, RunningCluster},
    server::{GRPC, HttpServer, ServerAddress, ServerPlace, TLS, kind, nothing_runs, running_at},
    settings::{ClusterTlsArgs, KeyArgs},
};
use anyhow::{Context, Error, Result, anyhow, bail};
use std::time::Duration;
use tandem_proto::{
    channel::{self, Channel, Network, PeerRole, status_text},
    v1::{DrainRequest, WorkersReply, WorkersRequest, control_client::ControlClient, router_client::RouterClient},
};
use tokio::{runtime::Runtime, time::timeout};
use tonic::Code;

/// Time limit for a reply. A healthy router answers within milliseconds.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// The router that a command reads, and how it authenticates.
#[derive(clap::Args, Debug)]
pub struct RouterAddress {
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
}

impl RouterAddress {
    /// Connects to the router. `command` is named in errors.
    ///
    /// # Errors
    /// Fails if the key or the certificate cannot be read, or if several clusters run and none is named.
    pub(crate) fn open(&self, command: &str) -> Result<RouterConnection> {
        RouterConnection::open(self, command)
    }
}

/// A connection to a router.
pub(crate) struct RouterConnection {
    runtime: Runtime,
    client: RouterClient<Channel>,
    network: Network,
    address: ServerAddress,
    /// Whether the router is a part of a `tandem up` of this user.
    pub(crate) of_up: bool,
    /// The message if no router answers.
    missing: String,
}

const WANTED: &str =
    "this command reads a router: write the port of its --listen, which is 7000 unless set; `tandem up` prints it";

const CERTIFICATE: &str = "for a router with a certificate, set --cluster-cert, --cluster-cert-key and --cluster-ca to the files tool.pem, \
                           tool.key and ca.pem that its `tandem cert` has made; otherwise write the port of a router's --listen";

impl RouterConnection {
    /// Connects to the named router, to the router of this user's only running cluster, or to the default address. A running cluster's file
    /// has its key, which is used unless `--cluster-key-file` is given.
    /// `command` is named in errors.
    fn open(args: &RouterAddress, command: &str) -> Result<Self> {
        let tls = args.cluster_tls.open(PeerRole::Tool, None)?;
        let folders = running::folders();
        let found = match &args.router {
            Some(address) => running_at(&folders, address),
            None => RunningCluster::only(&folders, command)?,
        };
        let key = match &found {
            Some(cluster) if args.key.cluster_key_file.is_none() => cluster.key.read()?,
            _ => args.key.read()?,
        };
        let (of_up, is_default) = (found.is_some(), found.is_none() && args.router.is_none());
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
        let router = Self { of_up, ..Self::connect(&address, network)? };
        Ok(if is_default { Self { missing: nothing_runs("router", &address), ..router } } else { router })
    }

    fn connect(address: &ServerAddress, network: Network) -> Result<Self> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().context("the process cannot start threads")?;
        let endpoint = channel::endpoint(&address.host_port())?;
        let channel = {
            let _within = runtime.enter();
            network.expecting(&[PeerRole::Router]).connect_lazy(&endpoint)
        };
        let missing = format!("no router answers at {address}; {WANTED}");
        Ok(Self { runtime, client: RouterClient::new(channel), network, address: address.clone(), of_up: false, missing })
    }

    /// Reads the router's view.
    pub(crate) fn view(&mut self) -> Result<WorkersReply> {
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
                anyhow!("{} is the gRPC port of a worker or an endpoint picker; {WANTED}", self.address)
            }
            _ => self.wrong_kind().unwrap_or_else(|| anyhow!("{}", status.message()).context(self.missing.clone())),
        })?;
        self.missing = format!("the router at {} does not answer any more", self.address);
        Ok(reply.into_inner())
    }

    /// Returns the error for an address at which no router answers this call; `None` if nothing answers at it.
    fn wrong_kind(&self) -> Option<Error> {
        let kind = kind(&self.address)?;
        Some(anyhow!("{} is {kind}; {}", self.address, if kind == TLS { CERTIFICATE } else { WANTED }))
    }

    /// Asks a worker to drain and end.
    ///
    /// # Errors
    /// Fails if the worker cannot be reached, or if it refuses.
    pub(crate) fn drain(&mut self, address: &str, instance_id: &str) -> Result<()> {
        let endpoint = channel::endpoint(address)?;
        let reply = self.runtime.block_on(async {
            let workers = self.network.expecting(&[PeerRole::PrefillWorker, PeerRole::DecodeWorker]);
            let mut worker = ControlClient::new(workers.connect_lazy(&endpoint));
            timeout(REPLY_TIMEOUT, worker.drain(DrainRequest { instance_id: instance_id.to_owned() })).await
        });
        match reply {
            Err(_) => bail!("the worker at {address} does not answer; end its process with SIGTERM"),
            Ok(Err(status)) => bail!("the worker at {address} does not drain: {}", status_text(&status)),
            Ok(Ok(_)) => Ok(()),
        }
    }
}
