//! A proxy in front of one process. It can interrupt the connections that all other processes, or some of them, have to this process.

use std::{fs, net::SocketAddr};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    runtime::Handle,
    sync::watch,
    task::JoinSet,
};

/// The state of a proxy, which decides what happens to its connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gate {
    Open,
    /// Delivers no bytes until the gate is open again.
    Stalled(Dialers),
    /// Closes existing and new connections.
    Broken(Dialers),
}

/// The processes whose connections are interrupted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dialers {
    All,
    Processes(Vec<u32>),
}

impl Dialers {
    fn include(&self, dialer: Option<u32>) -> bool {
        match self {
            Self::All => true,
            Self::Processes(ids) => dialer.is_some_and(|id| ids.contains(&id)),
        }
    }
}

/// A proxy in front of one process. Dropping it closes all of its connections.
pub struct Proxy {
    pub at: SocketAddr,
    gate: watch::Sender<Gate>,
    _accepting: JoinSet<()>,
}

impl Proxy {
    /// Listens at `at` and forwards each connection to `target`. The process at `target` may start later.
    pub fn start(at: SocketAddr, target: SocketAddr, runtime: &Handle) -> Self {
        let (gate, state) = watch::channel(Gate::Open);
        let listener = runtime.block_on(TcpListener::bind(at)).expect("the address is free");
        let mut accepting = JoinSet::new();
        let accept = async move {
            let mut connections = JoinSet::new();
            loop {
                // Accepting a connection may fail, for example when no file descriptor is free.
                let Ok((stream, from)) = listener.accept().await else { continue };
                while connections.try_join_next().is_some() {}
                connections.spawn(forward_connection(stream, target, dialer(from.port(), at.port()), state.clone()));
            }
        };
        accepting.spawn_on(accept, runtime);
        Self { at, gate, _accepting: accepting }
    }

    pub fn set(&self, gate: Gate) {
        self.gate.send_replace(gate);
    }
}

/// Forwards one connection until either end or the gate closes it. `dialer` is the id of the connecting process; `None` if it is unknown.
async fn forward_connection(from: TcpStream, target: SocketAddr, dialer: Option<u32>, gate: watch::Receiver<Gate>) {
    let mut breaking = gate.clone();
    let breaks = breaking.wait_for(|gate| matches!(gate, Gate::Broken(dialers) if dialers.include(dialer)));
    let forwarded = async {
        let Ok(to) = TcpStream::connect(target).await else { return };
        for stream in [&from, &to] {
            stream.set_nodelay(true).expect("a connected socket accepts options");
        }
        let ((from_read, from_write), (to_read, to_write)) = (from.into_split(), to.into_split());
        let to_target = forward(from_read, to_write, dialer, gate.clone());
        let back = forward(to_read, from_write, dialer, gate);
        let _ = tokio::try_join!(to_target, back);
    };
    tokio::select! {
        biased;
        _ = breaks => {}
        () = forwarded => {}
    }
}

async fn forward(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    dialer: Option<u32>,
    mut gate: watch::Receiver<Gate>,
) -> std::io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let read = from.read(&mut buffer).await?;
        let passes = gate.wait_for(|gate| !matches!(gate, Gate::Stalled(dialers) if dialers.include(dialer))).await;
        passes.map_err(std::io::Error::other)?;
        if read == 0 {
            return to.shutdown().await;
        }
        to.write_all(&buffer[..read]).await?;
    }
}

/// Returns the id of the process that has a socket with local port `own` and remote port `peer`; `None` if the process has already ended.
fn dialer(own: u16, peer: u16) -> Option<u32> {
    let sockets = fs::read_to_string("/proc/net/tcp").expect("Linux lists its sockets");
    let [own, peer] = [own, peer].map(|port| format!(":{port:04X}"));
    let inode = sockets.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).find_map(|fields| {
        let is_it = fields.get(1)?.ends_with(&own) && fields.get(2)?.ends_with(&peer);
        is_it.then(|| format!("socket:[{}]", fields[9]))
    })?;
    let holds = |id: u32| {
        let files = fs::read_dir(format!("/proc/{id}/fd")).into_iter().flatten().flatten();
        files.filter_map(|file| fs::read_link(file.path()).ok()).any(|link| link.as_os_str() == &*inode)
    };
    let processes = fs::read_dir("/proc").expect("Linux lists its processes").flatten();
    processes.filter_map(|process| process.file_name().to_str()?.parse().ok()).find(|id| holds(*id))
}
