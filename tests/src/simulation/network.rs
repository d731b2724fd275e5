//! A simulated network in memory. Hosts have names. The delivery of bytes between two hosts takes time, and can be delayed or interrupted.
//!
//! The network affects streams as an IP network affects TCP: bytes arrive late, or only when a partition has ended, or never because the
//! connection broke. Within a connection, bytes are neither lost nor reordered.

use super::{log::Log, random::Random};
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::{BTreeMap, VecDeque},
    io,
    sync::Arc,
    time::Duration,
};
use tandem_process::Shutdown;
use tandem_proto::{
    ClusterKey,
    channel::{Arrivals, Dial, Listener, Network},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, duplex, split},
    sync::{Notify, mpsc, oneshot},
    time::{Instant, sleep, sleep_until},
};

/// The number of bytes that a connection can buffer at each end, and that can be in flight in each direction.
const BUFFER_BYTES: usize = 64 << 10;
/// Maximum number of connections of a host that have not been accepted yet. Further connections are refused, as an operating system does.
const BACKLOG: usize = 1_024;

pub(super) type Name = Arc<str>;

/// The properties of one direction between two hosts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Link {
    pub(super) open: bool,
    /// The shortest delay of a chunk. A random time of up to half this delay is added for each chunk.
    pub(super) delay: Duration,
    /// The pause between two chunks. It does not depend on the sizes of the chunks, which vary between runs because HTTP headers contain
    /// the date.
    pub(super) pause: Duration,
}

#[derive(Clone)]
pub(super) struct SimulatedNetwork {
    state: Arc<Mutex<State>>,
    tasks: Shutdown,
    key: ClusterKey,
    log: Log,
}

struct State {
    random: Random,
    listeners: BTreeMap<Name, mpsc::Sender<DuplexStream>>,
    links: BTreeMap<(Name, Name), Arc<Gate>>,
    connections: BTreeMap<u64, Open>,
    next_connection: u64,
}

/// A link and the tasks that wait until it opens. The tasks are woken in the order in which they began to wait, which a `watch` channel
/// would not guarantee.
struct Gate {
    link: Mutex<Link>,
    opened: Notify,
}

struct Open {
    ends: (Name, Name),
    broken: oneshot::Sender<Broken>,
}

/// The cause for which a connection broke.
enum Broken {
    /// A fault between the connection's ends: both ends detect it at once.
    Cut,
    /// One host is down: if `dialled` is true, the host to which the connection was made, otherwise the host that made it. The other host
    /// detects this when the network delivers a packet.
    HostDown { dialled: bool },
}

impl Link {
    pub(super) const CLEAR: Self = Self { open: true, delay: Duration::from_millis(1), pause: Duration::ZERO };
}

impl SimulatedNetwork {
    pub(super) fn new(random: Random, key: ClusterKey, log: Log) -> Self {
        let state = State {
            random,
            listeners: BTreeMap::new(),
            links: BTreeMap::new(),
            connections: BTreeMap::new(),
            next_connection: 0,
        };
        Self { state: Arc::new(Mutex::new(state)), tasks: Shutdown::default(), key, log }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Returns the network from which this host connects to other hosts.
    pub(super) fn of(&self, host: &Name) -> Network {
        Network::memory(self.dial_from(host), self.key.clone())
    }

    /// Returns the function with which this host connects to other hosts.
    pub(super) fn dial_from(&self, host: &Name) -> Arc<Dial> {
        let (network, host) = (self.clone(), host.clone());
        Arc::new(move |address: &str| {
            let (network, host, address) = (network.clone(), host.clone(), address.to_owned());
            Box::pin(async move { network.dial(host, &address).await })
        })
    }

    /// Listens on this host, on every port.
    pub(super) fn listen(&self, host: &Name) -> Listener {
        let (sender, arriving) = mpsc::channel(BACKLOG);
        self.lock().listeners.insert(host.clone(), sender);
        Listener::new(Arrivals::Memory(arriving), self.of(host))
    }

    /// Stops the host: its ports close, and its connections break.
    pub(super) fn stop(&self, host: &Name) {
        self.lock().listeners.remove(host);
        self.break_matching(|(dialling, dialled)| match (dialling == host, dialled == host) {
            (_, true) => Some(Broken::HostDown { dialled: true }),
            (true, false) => Some(Broken::HostDown { dialled: false }),
            (false, false) => None,
        });
    }

    pub(super) fn cut(&self, one: &Name, other: &Name) {
        self.break_matching(|(dialling, dialled)| {
            ((dialling, dialled) == (one, other) || (dialling, dialled) == (other, one)).then_some(Broken::Cut)
        });
    }

    fn break_matching(&self, how: impl Fn((&Name, &Name)) -> Option<Broken>) {
        let mut state = self.lock();
        let broken: Vec<_> =
            state.connections.iter().filter_map(|(id, open)| Some((*id, how((&open.ends.0, &open.ends.1))?))).collect();
        for (id, how) in broken {
            let open = state.connections.remove(&id).expect("the connection exists");
            // Sending fails only if the connection has just ended by itself.
            let _ = open.broken.send(how);
        }
    }

    pub(super) fn set(&self, link_between: impl Fn(&Name, &Name) -> Link) {
        for ((from, to), gate) in &self.lock().links {
            let now = link_between(from, to);
            *gate.link.lock() = now;
            if now.open {
                gate.opened.notify_waiters();
            }
        }
    }

    pub(super) fn add_link(&self, from: &Name, to: &Name) {
        self.lock()
            .links
            .entry((from.clone(), to.clone()))
            .or_insert_with(|| Arc::new(Gate { link: Mutex::new(Link::CLEAR), opened: Notify::new() }));
    }

    fn direction(&self, from: &Name, to: &Name) -> io::Result<Direction> {
        let mut state = self.lock();
        let random = state.random.fork();
        let gate = state.links.get(&(from.clone(), to.clone())).ok_or(io::ErrorKind::HostUnreachable)?.clone();
        Ok(Direction { gate, random })
    }

    async fn dial(self, from: Name, address: &str) -> io::Result<DuplexStream> {
        let to: Name = address.split_once(':').map_or(address, |(host, _)| host).into();
        self.direction(&from, &to)?.pass().await;
        let listener = self.lock().listeners.get(&to).cloned();
        let (far, far_wire) = duplex(BUFFER_BYTES);
        if listener.is_none_or(|listener| listener.try_send(far).is_err()) {
            self.direction(&to, &from)?.pass().await;
            self.log.record(format_args!("{from} → {to}: refused"));
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let (near, near_wire) = duplex(BUFFER_BYTES);
        let (out, back) = (self.direction(&from, &to)?, self.direction(&to, &from)?);
        let (broken, breaks) = oneshot::channel();
        let id = {
            let mut state = self.lock();
            let id = state.next_connection;
            state.next_connection += 1;
            state.connections.insert(id, Open { ends: (from.clone(), to.clone()), broken });
            id
        };
        let connection = Connection { network: self.clone(), id, name: format!("{from} → {to} #{id}") };
        self.tasks.spawn(connection.forward(near_wire, far_wire, out, back, breaks));
        self.direction(&to, &from)?.pass().await;
        Ok(near)
    }
}

struct Direction {
    gate: Arc<Gate>,
    random: Random,
}

impl Direction {
    fn delay(&mut self) -> Duration {
        let delay = self.link().delay;
        delay + delay.mul_f64(self.random.within(0..50) as f64 / 100.0)
    }

    fn link(&self) -> Link {
        *self.gate.link.lock()
    }

    async fn open(&self) {
        while !self.link().open {
            // The simulation has only one thread, so the link cannot open between the check and the wait.
            self.gate.opened.notified().await;
        }
    }

    /// Waits for as long as the network takes to deliver a single small packet, including its retransmissions.
    async fn pass(&mut self) {
        self.open().await;
        sleep(self.delay()).await;
        self.open().await;
    }

    /// Forwards bytes until the sender closes; fails if the receiver has closed. Calls `passed` before each chunk is delivered.
    async fn forward(
        &mut self,
        mut from: impl AsyncRead + Unpin,
        mut to: impl AsyncWrite + Unpin,
        passed: impl Fn(),
    ) -> io::Result<()> {
        let (mut in_flight, mut bytes): (VecDeque<(Instant, Vec<u8>)>, usize) = Default::default();
        let (mut buffer, mut free_at, mut ended) = (vec![0; BUFFER_BYTES], Instant::now(), false);
        loop {
            let first_at = in_flight.front().map(|(at, _)| *at);
            tokio::select! {
                biased;
                read = from.read(&mut buffer), if !ended && bytes < BUFFER_BYTES => {
                    let len = read?;
                    ended = len == 0;
                    free_at = free_at.max(Instant::now()) + self.link().pause;
                    let last_at = in_flight.back().map_or(free_at, |(at, _)| *at);
                    let at = (Instant::now() + self.delay()).max(free_at).max(last_at);
                    bytes += len;
                    in_flight.push_back((at, buffer[..len].to_vec()));
                }
                () = async { sleep_until(first_at.expect("a chunk is in flight")).await }, if first_at.is_some() => {
                    self.open().await;
                    let (_, chunk) = in_flight.pop_front().expect("a chunk is in flight");
                    if chunk.is_empty() {
                        return to.shutdown().await;
                    }
                    bytes -= chunk.len();
                    passed();
                    to.write_all(&chunk).await?;
                }
            }
        }
    }
}

struct Connection {
    network: SimulatedNetwork,
    id: u64,
    name: String,
}

impl Connection {
    async fn forward(
        self,
        near: DuplexStream,
        far: DuplexStream,
        mut out: Direction,
        mut back: Direction,
        breaks: oneshot::Receiver<Broken>,
    ) {
        let log = &self.network.log;
        log.record(format_args!("{}: open", self.name));
        let (mut near_reads, mut near_writes) = split(near);
        let (mut far_reads, mut far_writes) = split(far);
        let forwarded = async {
            let outwards = out.forward(&mut near_reads, &mut far_writes, || log.add_to_trace(format_args!("{} >", self.id)));
            let backwards = back.forward(&mut far_reads, &mut near_writes, || log.add_to_trace(format_args!("{} <", self.id)));
            tokio::try_join!(outwards, backwards)
        };
        tokio::select! {
            biased;
            broken = breaks => {
                log.record(format_args!("{}: broken", self.name));
                match broken {
                    Ok(Broken::HostDown { dialled: true }) => {
                        drop((far_reads, far_writes));
                        back.pass().await;
                    }
                    Ok(Broken::HostDown { dialled: false }) => {
                        drop((near_reads, near_writes));
                        out.pass().await;
                    }
                    Ok(Broken::Cut) | Err(_) => {}
                }
            }
            forwarded = forwarded => {
                let how = if forwarded.is_ok() { "closed" } else { "closed from one side" };
                log.record(format_args!("{}: {how}", self.name));
            }
        }
        self.network.lock().connections.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct TwoHosts {
        network: SimulatedNetwork,
        names: [Name; 2],
        arriving: mpsc::Receiver<DuplexStream>,
        dial: Arc<Dial>,
    }

    /// A network with two hosts: `a` connects, and `b` listens.
    fn two_hosts() -> TwoHosts {
        let network = SimulatedNetwork::new(Random::new(7), ClusterKey::default(), Log::new());
        let names: [Name; 2] = ["a".into(), "b".into()];
        network.add_link(&names[0], &names[1]);
        network.add_link(&names[1], &names[0]);
        let Arrivals::Memory(arriving) = network.listen(&names[1]).into_arrivals() else {
            panic!("the simulated listener is in memory")
        };
        let dial = network.dial_from(&names[0]);
        TwoHosts { network, names, arriving, dial }
    }

    impl TwoHosts {
        async fn connect(&mut self) -> (DuplexStream, DuplexStream) {
            let near = (self.dial)("b:1").await.expect("host b listens");
            (near, self.arriving.recv().await.expect("the connection arrives"))
        }

        fn set(&self, from: usize, link: Link) {
            self.network.set(|of, _| if *of == self.names[from] { link } else { Link::CLEAR });
        }
    }

    /// Reads all bytes that arrive within this time.
    async fn read(from: &mut DuplexStream, within: Duration) -> Vec<u8> {
        let mut all = Vec::new();
        let _ = tokio::time::timeout(within, from.read_to_end(&mut all)).await;
        all
    }

    const LONG: Duration = Duration::from_secs(100);

    #[tokio::test(start_paused = true)]
    async fn bytes_arrive_completely_in_order_after_the_delay() {
        let mut hosts = two_hosts();
        let (mut near, mut far) = hosts.connect().await;
        hosts.set(0, Link { delay: Duration::from_millis(200), pause: Duration::from_millis(500), ..Link::CLEAR });
        let sent: Vec<u8> = (0..20_000u32).map(|at| at as u8).collect();
        let started = Instant::now();
        for chunk in sent.chunks(5_000) {
            near.write_all(chunk).await.expect("the buffer has capacity");
            sleep(Duration::from_millis(1)).await;
        }
        drop(near);
        assert_eq!(read(&mut far, Duration::from_millis(190)).await, [0u8; 0]);
        assert_eq!(read(&mut far, LONG).await, sent);
        let elapsed = started.elapsed();
        assert!((Duration::from_millis(2_000)..Duration::from_millis(2_900)).contains(&elapsed), "{elapsed:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn partition_in_one_direction_delays_bytes_until_the_partition_ends() {
        let mut hosts = two_hosts();
        let (mut near, mut far) = hosts.connect().await;
        hosts.set(0, Link { open: false, ..Link::CLEAR });
        near.write_all(b"question").await.expect("the buffer has capacity");
        far.write_all(b"answer").await.expect("the buffer has capacity");
        assert_eq!(read(&mut near, LONG).await, b"answer");
        assert_eq!(read(&mut far, LONG).await, [0u8; 0]);
        let mut dialling = (hosts.dial)("b:1");
        assert!(tokio::time::timeout(LONG, &mut dialling).await.is_err(), "no packet passes a blocked link");
        hosts.set(0, Link::CLEAR);
        assert_eq!(read(&mut far, LONG).await, b"question");
        assert!(dialling.await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn crashed_host_is_detected_as_soon_as_packets_can_pass() {
        let mut hosts = two_hosts();
        let (mut near, _far) = hosts.connect().await;
        hosts.set(1, Link { open: false, ..Link::CLEAR });
        hosts.network.stop(&hosts.names[1]);
        let mut byte = [0];
        assert!(
            tokio::time::timeout(LONG, near.read(&mut byte)).await.is_err(),
            "the crash is not detected while no packet is delivered"
        );
        hosts.set(1, Link::CLEAR);
        assert_eq!(near.read(&mut byte).await.expect("the end of the stream is not an error"), 0);
        let refused = (hosts.dial)("b:1").await.expect_err("the port is closed");
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[tokio::test(start_paused = true)]
    async fn broken_connection_is_detected_at_both_ends_and_can_be_reopened() {
        let mut hosts = two_hosts();
        let (mut near, mut far) = hosts.connect().await;
        hosts.network.cut(&hosts.names[1], &hosts.names[0]);
        for end in [&mut near, &mut far] {
            assert_eq!(end.read(&mut [0]).await.expect("the end of the stream is not an error"), 0);
        }
        let (mut near, mut far) = hosts.connect().await;
        near.write_all(b"again").await.expect("the buffer has capacity");
        drop(near);
        assert_eq!(read(&mut far, LONG).await, b"again");
    }
}
