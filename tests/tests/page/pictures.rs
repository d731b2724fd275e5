//! Takes the pictures of the documents, from a cluster that runs on this machine:
//!
//! ```sh
//! tandem up --listen 8000
//! PAGE_SERVER=127.0.0.1:8000 PAGE_SHOTS="$PWD/docs" cargo test --release -p tandem-tests --test page -- --ignored pictures
//! ```

use crate::browser::Browser;
use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt};
use serde_json::{Value, json};
use std::path::Path;
use tandem_tests::{Client, Endpoint, prose};

/// The window size of the pictures, and of the picture of the dashboard.
const WINDOW: (u32, u32) = (1280, 800);
const LONG_WINDOW: (u32, u32) = (1280, 1420);
const QUESTIONS: [&str; 2] =
    ["What is a tandem bicycle? Explain it so that a child understands.", "And which of the two steers?"];

async fn converse(browser: &mut Browser) -> Result<()> {
    browser
        .value("document.getElementById('chat-temperature').value = 0, document.getElementById('chat-max').value = 120")
        .await?;
    for (turn, question) in QUESTIONS.iter().enumerate() {
        browser.value("document.getElementById('message').focus()").await?;
        browser.write(question).await?;
        browser.press("Enter").await?;
        browser.until(&format!("document.querySelectorAll('#conversation [data-field=usage]').length === {}", turn + 1)).await?;
    }
    Ok(())
}

/// Sends prompts that begin alike, some of them at the same time, so that the router uses all workers.
async fn load(client: &Client) -> Result<()> {
    let (_, models) = client.get("/v1/models").await?;
    let models: Value = serde_json::from_str(&models)?;
    let model = models["data"][0]["id"].as_str().context("the server has no model")?;
    let ask = async |number: u64| {
        let text = format!("{} {number}", prose(&format!("document {}", number % 3), 150 + 60 * (number as usize % 3)));
        let body = Endpoint::Chat.request(model, &text, json!({ "max_tokens": 8 + number % 9 }));
        let answer = client.answer(Endpoint::Chat.path(), &body).await?;
        ensure!(answer.status == 200, "{answer:?}");
        anyhow::Ok(())
    };
    futures::stream::iter((0..18).map(ask)).buffer_unordered(3).try_collect::<()>().await?;
    client.answer(Endpoint::Chat.path(), &Endpoint::Chat.request(model, "", json!({ "max_tokens": -1 }))).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "writes the pictures of the documents, and needs a cluster that runs"]
async fn pictures_of_the_documents() -> Result<()> {
    let server = std::env::var("PAGE_SERVER").context("set PAGE_SERVER to the address of a frontend, such as 127.0.0.1:8000")?;
    let folder = std::env::var("PAGE_SHOTS").context("set PAGE_SHOTS to the folder of the documents")?;
    let client = Client::new(server.parse()?);
    let mut browser = Browser::start().await?;
    browser.show(WINDOW, "light").await?;
    browser.call("Emulation.setScrollbarsHidden", json!({ "hidden": true })).await?;
    browser.open(&format!("http://{server}/chat")).await?;
    browser.until("document.getElementById('chat-model')?.value > ''").await?;
    converse(&mut browser).await?;
    std::fs::write(Path::new(&folder).join("tour-chat.png"), browser.picture(false).await?)?;
    load(&client).await?;
    browser.open(&format!("http://{server}/dashboard")).await?;
    browser.until("document.querySelectorAll('#recent tbody tr').length > 15").await?;
    let remote =
        "[...document.querySelectorAll('#recent tbody tr')].find((row) => row.querySelector('[data-field=prefill_worker] i'))";
    browser.until(&format!("{remote}?.querySelector('button').click(), document.getElementById('request').open")).await?;
    std::fs::write(Path::new(&folder).join("tour-timeline.png"), browser.picture(false).await?)?;
    browser.press("Escape").await?;
    browser.value("document.activeElement.blur()").await?;
    browser.show(LONG_WINDOW, "light").await?;
    browser.until("document.getElementById('hit-rate').querySelector('svg') !== null").await?;
    std::fs::write(Path::new(&folder).join("dashboard.png"), browser.picture(false).await?)?;
    Ok(())
}
