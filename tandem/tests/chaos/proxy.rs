//! A network that can fail: a process behind a proxy can be cut off from all others, or from one.

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

/// What happens to connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gate {
    Open,
    /// Nothing arrives, as when packets are lost; all of it does once the gate is open.
    Stalled(Whose),
    /// Those there are break, and new ones are refused.
    Broken(Whose),
}

/// The connections that are cut off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whose {
    Everybody,
    /// The processes that have dialled.
    These(Vec<u32>),
}

impl Whose {
    fn are(&self, dialler: Option<u32>) -> bool {
        match self {
            Self::Everybody => true,
            Self::These(ids) => dialler.is_some_and(|id| ids.contains(&id)),
        }
    }
}

/// Dropping it breaks all connections.
pub struct Proxy {
    pub at: SocketAddr,
    gate: watch::Sender<Gate>,
    _accepting: JoinSet<()>,
}

impl Proxy {
    /// Listens at `at` for the process at `target`, which may start later.
    pub fn start(at: SocketAddr, target: SocketAddr, runtime: &Handle) -> Self {
        let (gate, state) = watch::channel(Gate::Open);
        let listener = runtime.block_on(TcpListener::bind(at)).expect("the address is free");
        let mut accepting = JoinSet::new();
        let accept = async move {
            let mut connections = JoinSet::new();
            loop {
                // Out of files, perhaps: the next one may be taken again.
                let Ok((stream, from)) = listener.accept().await else { continue };
                while connections.try_join_next().is_some() {}
                connections.spawn(carry(stream, target, dialler(from.port(), at.port()), state.clone()));
            }
        };
        accepting.spawn_on(accept, runtime);
        Self { at, gate, _accepting: accepting }
    }

    pub fn set(&self, gate: Gate) {
        self.gate.send_replace(gate);
    }
}

/// One connection, until either side has closed it or the gate breaks it.
async fn carry(from: TcpStream, target: SocketAddr, dialler: Option<u32>, gate: watch::Receiver<Gate>) {
    let mut breaking = gate.clone();
    let breaks = breaking.wait_for(|gate| matches!(gate, Gate::Broken(whose) if whose.are(dialler)));
    let carried = async {
        let Ok(to) = TcpStream::connect(target).await else { return };
        for stream in [&from, &to] {
            stream.set_nodelay(true).expect("a connected socket");
        }
        let ((from_read, from_write), (to_read, to_write)) = (from.into_split(), to.into_split());
        let there = pump(from_read, to_write, dialler, gate.clone());
        let back = pump(to_read, from_write, dialler, gate);
        // Whoever breaks off on one side ends the other.
        let _ = tokio::try_join!(there, back);
    };
    tokio::select! {
        biased;
        _ = breaks => {}
        () = carried => {}
    }
}

async fn pump(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    dialler: Option<u32>,
    mut gate: watch::Receiver<Gate>,
) -> std::io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let read = from.read(&mut buffer).await?;
        let passes = gate.wait_for(|gate| !matches!(gate, Gate::Stalled(whose) if whose.are(dialler))).await;
        passes.map_err(std::io::Error::other)?;
        if read == 0 {
            return to.shutdown().await;
        }
        to.write_all(&buffer[..read]).await?;
    }
}

/// The process that has a socket with these ports, its own and its peer's, as the system lists them. It may have ended already.
fn dialler(own: u16, peer: u16) -> Option<u32> {
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
