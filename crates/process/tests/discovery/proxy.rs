//! A proxy in front of a server. It can interrupt all connections, and can hold back the data of clients once the server has sent a given text.

use std::sync::Arc;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
};

#[derive(Clone, Debug, Default, PartialEq)]
struct State {
    cut: bool,
    hold_after: Option<Arc<[u8]>>,
    held: bool,
}

pub struct Proxy {
    address: String,
    state: watch::Sender<State>,
    _task: JoinSet<()>,
}

impl Proxy {
    pub async fn to(server: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("the listener is bound").to_string();
        let (state, _) = watch::channel(State::default());
        let (server, shared, mut task) = (server.to_owned(), state.clone(), JoinSet::new());
        task.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (client, _) = listener.accept().await.expect("the proxy listens");
                if shared.borrow().cut {
                    continue;
                }
                let Ok(server) = TcpStream::connect(&server).await else { continue };
                connections.spawn(connection(client, server, shared.clone()));
            }
        });
        Self { address, state, _task: task }
    }

    pub fn address(&self) -> String {
        self.address.clone()
    }

    pub fn cut(&self) {
        self.state.send_modify(|state| state.cut = true);
    }

    pub fn restore(&self) {
        self.state.send_modify(|state| {
            state.cut = false;
            state.held = false;
        });
    }

    /// Holds back the clients' data from the moment at which the server has sent this text until [`Proxy::restore`] is called.
    pub fn hold_after(&self, text: &[u8]) {
        self.state.send_modify(|state| state.hold_after = Some(text.into()));
    }
}

async fn connection(client: TcpStream, server: TcpStream, state: watch::Sender<State>) {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let (mut cut, mut released) = (state.subscribe(), state.subscribe());
    let up = async {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(read @ 1..) = from_client.read(&mut buffer).await {
            released.wait_for(|state| !state.held).await.expect("this function keeps a sender");
            if to_server.write_all(&buffer[..read]).await.is_err() {
                return;
            }
        }
    };
    let down = async {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(read @ 1..) = from_server.read(&mut buffer).await {
            state.send_if_modified(|state| {
                let sent = |text: &Arc<[u8]>| buffer[..read].windows(text.len()).any(|window| *window == **text);
                let hold = state.hold_after.as_ref().is_some_and(sent);
                if hold {
                    (state.held, state.hold_after) = (true, None);
                }
                hold
            });
            if to_client.write_all(&buffer[..read]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = up => {}
        () = down => {}
        _ = cut.wait_for(|state| state.cut) => {}
    }
}
