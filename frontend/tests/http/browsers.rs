//! Requests that browsers send for pages of other sites, and the operator's pages on a separate port.

use crate::support::*;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use std::net::SocketAddr;
use tandem_process::listen::Hosts;
use tokio::net::TcpListener;

async fn status_and_code(reply: Reply) -> (u16, Value) {
    let (status, text) = reply.text().await;
    (status.as_u16(), serde_json::from_str::<Value>(&text).map_or(Value::Null, |body| body["error"]["code"].clone()))
}

#[tokio::test]
async fn requests_from_a_page_of_another_site_are_refused() {
    let mut cluster = Cluster::start().await;
    let foreign = [
        &[("origin", "https://evil.example")][..],
        &[("origin", "null")],
        &[("sec-fetch-site", "cross-site")],
        &[("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")],
    ];
    for headers in foreign {
        let reply = cluster.send(Method::POST, CHAT, headers, chat(json!({})).to_string()).await;
        assert_eq!(status_and_code(reply).await, (403, json!("foreign_origin")), "{headers:?}");
    }
    for path in ["/dashboard", "/dashboard/cluster", "/metrics", "/v1/models"] {
        let reply = cluster.send(Method::GET, path, &[("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "cors")], "").await;
        assert_eq!(status_and_code(reply).await.0, 403, "{path}");
        // Requests from a page of this server, and navigation to the page by a link, are accepted.
        for headers in [&[("sec-fetch-site", "same-origin")], &[("sec-fetch-mode", "navigate")]] {
            assert_eq!(cluster.send(Method::GET, path, headers, "").await.status(), StatusCode::OK, "{path} {headers:?}");
        }
    }
    assert!(cluster.no_call(), "a refused request does not reach a worker");
}

async fn get_as(address: SocketAddr, path: &str, host: &str) -> (u16, Value) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(address).await.expect("the frontend listens");
    let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("the frontend reads");
    let mut text = String::new();
    soon(stream.read_to_string(&mut text)).await.expect("the frontend answers");
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("the answer has a status");
    let body = text.split_once("\r\n\r\n").expect("the answer has a head").1;
    (status, serde_json::from_str::<Value>(body).map_or(Value::Null, |body| body["error"]["code"].clone()))
}

#[tokio::test]
async fn foreign_host_name_is_refused_on_a_loopback_listener() {
    let cluster = Cluster::with(|settings| settings.hosts = Hosts::new(["llm.example".to_owned()])).await;
    for host in ["localhost", "127.0.0.1:8000", "[::1]", "llm.example:8000"] {
        assert_eq!(get_as(cluster.frontend, "/v1/models", host).await, (200, Value::Null), "{host}");
    }
    for host in ["evil.example", "evil.example:8000", "127.0.0.1.evil.example"] {
        assert_eq!(get_as(cluster.frontend, "/v1/models", host).await, (421, json!("unknown_host")), "{host}");
    }
}

#[tokio::test]
async fn foreign_host_name_is_refused_by_the_admin_listener_on_every_address() {
    let listener = TcpListener::bind("0.0.0.0:0").await.expect("a port is free");
    let port = listener.local_addr().expect("the listener is bound").port();
    let _cluster = Cluster::with(|settings| {
        settings.admin = Some(listener);
        settings.hosts = Hosts::new(["gpu-1".to_owned()]);
    })
    .await;
    let admin = (std::net::Ipv4Addr::LOCALHOST, port).into();
    for path in ["/metrics", "/dashboard/cluster", "/live"] {
        for host in ["10.0.0.7:9300", "localhost", "tandem.localhost", "gpu-1:9300"] {
            assert_eq!(get_as(admin, path, host).await.0, 200, "{path} {host}");
        }
        assert_eq!(get_as(admin, path, "evil.example:9300").await, (421, json!("unknown_host")), "{path}");
    }
}

#[tokio::test]
async fn operator_pages_are_served_only_by_the_admin_listener() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let admin = listener.local_addr().expect("the listener is bound");
    let mut cluster = Cluster::with(|settings| settings.admin = Some(listener)).await;
    let get = async |address, path| send(address, Method::GET, path, &[], "".into()).await.status().as_u16();
    for path in ["/metrics", "/dashboard", "/dashboard/cluster", "/dashboard/requests", "/dashboard/main.js"] {
        assert_eq!((get(admin, path).await, get(cluster.frontend, path).await), (200, 404), "{path}");
    }
    let page = send(cluster.frontend, Method::GET, "/dashboard", &[], "".into()).await;
    assert_eq!(status_and_code(page).await, (404, json!("admin_port")));
    for path in ["/chat", "/chat/chat.js"] {
        assert_eq!((get(admin, path).await, get(cluster.frontend, path).await), (404, 200), "{path}");
    }
    // `/` redirects to the port's own page, and no page has a link to a page that its port does not serve.
    for (address, page) in [(admin, "dashboard"), (cluster.frontend, "chat")] {
        let root = send(address, Method::GET, "/", &[], "".into()).await;
        assert_eq!(root.header("location"), Some(page));
        let (_, html) = send(address, Method::GET, &format!("/{page}"), &[], "".into()).await.text().await;
        assert!(!html.contains("class=\"neighbour\""), "{html}");
    }
    for path in ["/live", "/ready", "/openapi.json"] {
        assert_eq!((get(admin, path).await, get(cluster.frontend, path).await), (200, 200), "{path}");
    }
    assert_eq!(get(admin, "/v1/models").await, 404);
    // The admin listener explains placements, but generates no answers.
    let body = chat(json!({})).to_string();
    let explained = send(admin, Method::POST, CHAT, &[("x-tandem-explain", "true")], body.clone().into()).await;
    assert_eq!(explained.json().await.1["object"], "tandem.explanation");
    let refused = send(admin, Method::POST, CHAT, &[], body.into()).await;
    assert_eq!(status_and_code(refused).await, (404, json!("admin_port")));
    assert!(cluster.no_call());
    // The admin listener closes together with the API's listener.
    cluster.shutdown.stop();
    soon(&mut cluster.server).await.expect("the server does not panic").expect("the server ends without an error");
    assert!(tokio::net::TcpStream::connect(admin).await.is_err());
}

#[tokio::test]
async fn pages_of_listed_origins_may_use_the_api_but_not_the_operators_pages() {
    let mut cluster = Cluster::with(|settings| settings.cors_origins = vec!["https://chat.example".to_owned()]).await;
    let origin = ("origin", "https://chat.example");
    let asked = [origin, ("access-control-request-method", "POST"), ("access-control-request-headers", "authorization")];
    let preflight = cluster.send(Method::OPTIONS, CHAT, &asked, "").await;
    assert_eq!(preflight.status(), StatusCode::NO_CONTENT);
    assert_eq!(preflight.header("access-control-allow-origin"), Some("https://chat.example"));
    assert_eq!(preflight.header("access-control-allow-headers"), Some("authorization"));
    let frontend = cluster.frontend;
    let sent = [origin, ("sec-fetch-site", "cross-site")];
    let reply = tokio::spawn(async move { send(frontend, Method::POST, CHAT, &sent, chat(json!({})).to_string().into()).await });
    cluster.call().await.answer(Some(0), "x").await;
    let reply = soon(reply).await.expect("the client task runs");
    assert_eq!((reply.status(), reply.header("vary")), (StatusCode::OK, Some("origin")));
    assert_eq!(reply.header("access-control-allow-origin"), Some("https://chat.example"));
    for (path, origin) in [(CHAT, "https://evil.example"), ("/dashboard/cluster", "https://chat.example")] {
        let refused = cluster.send(Method::GET, path, &[("origin", origin), ("sec-fetch-site", "cross-site")], "").await;
        assert_eq!((refused.status(), refused.header("access-control-allow-origin")), (StatusCode::FORBIDDEN, None), "{path}");
    }
}
