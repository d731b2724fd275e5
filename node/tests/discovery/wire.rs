//! A wire to a server that can be cut, and that can hold back what a client sends after the server has sent something certain.

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
    /// The server's words after which the client's are held back.
    after: Option<Arc<[u8]>>,
    held: bool,
}

pub struct Wire {
    address: String,
    state: watch::Sender<State>,
    _task: JoinSet<()>,
}

impl Wire {
    pub async fn to(server: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound").to_string();
        let (state, _) = watch::channel(State::default());
        let (server, shared, mut task) = (server.to_owned(), state.clone(), JoinSet::new());
        task.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (client, _) = listener.accept().await.expect("it listens");
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

    /// Ends all connections and lets none through.
    pub fn cut(&self) {
        self.state.send_modify(|state| state.cut = true);
    }

    /// Lets everything through again.
    pub fn mend(&self) {
        self.state.send_modify(|state| {
            state.cut = false;
            state.held = false;
        });
    }

    /// Once the server has said this, nothing that clients say passes until [`Wire::mend`]. It happens once.
    pub fn hold_after(&self, words: &[u8]) {
        self.state.send_modify(|state| state.after = Some(words.into()));
    }
}

async fn connection(client: TcpStream, server: TcpStream, state: watch::Sender<State>) {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let (mut cut, mut let_through) = (state.subscribe(), state.subscribe());
    let up = async {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(read @ 1..) = from_client.read(&mut buffer).await {
            let_through.wait_for(|state| !state.held).await.expect("we hold the sender");
            if to_server.write_all(&buffer[..read]).await.is_err() {
                return;
            }
        }
    };
    let down = async {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(read @ 1..) = from_server.read(&mut buffer).await {
            state.send_if_modified(|state| {
                let said = |words: &Arc<[u8]>| buffer[..read].windows(words.len()).any(|window| *window == **words);
                let hold = state.after.as_ref().is_some_and(said);
                if hold {
                    (state.held, state.after) = (true, None);
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
