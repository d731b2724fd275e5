//! Tests of the pages at `/dashboard` and `/chat` in a real browser, on a cluster that has served requests.
//!
//! With `PAGE_SHOTS=FOLDER` the tests write screenshots to the folder.

mod browser;
mod chat;
mod cluster;
mod looks;
mod pictures;
mod why;

use anyhow::{Context, Result, ensure};
use browser::Browser;
use futures::{StreamExt, TryStreamExt};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;
use tandem_tests::{Client, Endpoint, prose, sum, wait_until};
use tokio::time::Instant;

/// The names contain markup, which would be interpreted if the page did not escape it.
const MODEL: &str = r#"<img src="x" onerror="document.title='owned'">"#;
const DECODE: &str = "<script>document.title='owned'</script>";
const WORKERS: [&str; 3] = ["prefill-0", "prefill-1", DECODE];
/// A text that is in every prompt and must not appear on the page.
const SECRET: &str = "wisteria";
/// Time limit until the page shows the current numbers.
const TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
const PHONE: (u32, u32) = (400, 800);
const DESK: (u32, u32) = (1440, 900);

/// Sends sixty prompts about seven documents. Then one client disconnects, and one sends an invalid request.
async fn traffic(client: &Client) -> Result<()> {
    let send_request = async |number: u64| {
        // Each prompt has a unique end that is longer than a block, so that some KV is always computed and transferred.
        let document = prose(&(number % 7).to_string(), 100 + 60 * (number as usize % 7));
        let text = format!("{document} {number} {SECRET} {}", prose(&format!("end {number}"), 20));
        let endpoint = if number.is_multiple_of(3) { Endpoint::Chat } else { Endpoint::Completions };
        let mut body = endpoint.request(MODEL, &text, json!({ "max_tokens": 5 + number % 20 }));
        if number.is_multiple_of(2) {
            (body["stream"], body["stream_options"]) = (true.into(), json!({ "include_usage": true }));
        }
        let answer = client.answer(endpoint.path(), &body).await?;
        ensure!(answer.status == 200, "{answer:?}");
        anyhow::Ok(())
    };
    futures::stream::iter((0..60).map(send_request)).buffer_unordered(4).try_collect::<()>().await?;
    let long = json!({ "max_tokens": 20_000, "ignore_eos": true, "stream": true });
    let body = Endpoint::Chat.request(MODEL, &prose(SECRET, 40), long);
    client.send(Endpoint::Chat.path(), &body).await?.chunk().await?;
    let refused =
        client.answer(Endpoint::Chat.path(), &Endpoint::Chat.request(MODEL, SECRET, json!({ "max_tokens": -1 }))).await?;
    ensure!(refused.status == 400);
    wait_until("all requests have ended", async || Ok(client.metric("tandem_frontend_inflight_requests", "").await? == 0.0)).await
}

/// Returns the numbers in all rows or tiles that `selector` finds, by worker (empty in a tile) and field.
async fn fields(browser: &mut Browser, selector: &str) -> Result<BTreeMap<(String, String), String>> {
    let cells = browser
        .value(&format!(
            "[...document.querySelectorAll('{selector} [data-field]')].map((cell) =>
                [cell.closest('tr')?.dataset.worker ?? '', cell.dataset.field, cell.textContent])"
        ))
        .await?;
    let cells: Vec<(String, String, String)> = serde_json::from_value(cells)?;
    Ok(cells.into_iter().map(|(worker, field, text)| ((worker, field), text.replace(',', ""))).collect())
}

/// Returns the differences between the page and `/metrics`.
async fn differences(browser: &mut Browser, client: &Client) -> Result<Vec<String>> {
    let mut shown = fields(browser, "#workers").await?;
    shown.extend(fields(browser, "#tiles").await?);
    let (_, metrics) = client.get("/metrics").await?;
    let mut wrong = Vec::new();
    let mut hold = |worker: &str, field: &str, series: &str, labels: &str| {
        let counted = sum(&metrics, series, labels);
        let text = shown.get(&(worker.to_owned(), field.to_owned()));
        if text.and_then(|text| text.parse::<f64>().ok()) != Some(counted) {
            wrong.push(format!("{worker} {field}: {text:?} is shown, {series}{{{labels}}} is {counted}"));
        }
    };
    for worker in WORKERS {
        let of = |more: &str| format!("worker=\"{worker}\"{more}");
        for (field, series, more) in [
            ("prompts", "tandem_worker_prefix_cache_requests_total", ""),
            ("prompt_tokens", "tandem_worker_prompt_tokens_total", ""),
            ("cached_tokens", "tandem_worker_cached_tokens_total", ""),
            ("overlap_blocks", "tandem_router_overlap_blocks_sum", ""),
            ("overlap_over_tokens", "tandem_router_overlap_over_tokens_total", ""),
            ("overlap_under_tokens", "tandem_router_overlap_under_tokens_total", ""),
            ("indexed_blocks", "tandem_router_index_blocks", ""),
            ("free_blocks", "tandem_worker_kv_blocks", ",state=\"free\""),
            ("cached_blocks", "tandem_worker_kv_blocks", ",state=\"cached\""),
            ("in_use_blocks", "tandem_worker_kv_blocks", ",state=\"in_use\""),
            ("waiting_requests", "tandem_worker_queue_depth", ""),
        ] {
            hold(worker, field, series, &of(more));
        }
    }
    for (field, series, labels) in [
        ("inflight", "tandem_frontend_inflight_requests", ""),
        ("answered", "tandem_frontend_requests_total", "code=\"200\""),
        ("failed", "tandem_frontend_requests_total", "code=\"5"),
        ("prompt_tokens", "tandem_frontend_prompt_tokens_total", ""),
        ("cached_tokens", "tandem_frontend_cached_tokens_total", ""),
        ("completion_tokens", "tandem_frontend_completion_tokens_total", ""),
        ("estimates", "tandem_frontend_unreported_prompts_total", ""),
    ] {
        hold("", field, series, labels);
    }
    Ok(wrong)
}

async fn shows_the_cluster(browser: &mut Browser, client: &Client) -> Result<()> {
    browser.until("document.getElementById('state').textContent === 'Ready'").await?;
    for place in ["#prefill .card", "#decode .card", "#workers tbody tr"] {
        browser.until(&format!("document.querySelectorAll('{place}').length > 0")).await?;
    }
    let named = "[...new Set([...document.querySelectorAll('.card[data-worker]')].map((card) => card.dataset.worker))].sort()";
    let mut all = WORKERS;
    all.sort_unstable();
    assert_eq!(browser.value(named).await?, json!(all));
    let cards = browser.value("document.getElementById('cluster').innerText").await?;
    ensure!(cards.as_str().is_some_and(|text| !text.contains("false") && !text.contains("undefined")), "{cards}");
    // The page is polled, because workers report their totals only every second, and the page is updated only every two seconds.
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let wrong = differences(browser, client).await?;
        if wrong.is_empty() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{}", wrong.join("\n"));
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Asserts that each answered request has a row with the usage that its client received.
async fn shows_the_requests(browser: &mut Browser, client: &Client) -> Result<()> {
    browser.until("document.getElementById('requests-sum').textContent === '25 of 61 shown'").await?;
    let mut steps = 0;
    while browser.value("!document.getElementById('more').hidden").await? == true {
        steps += 1;
        ensure!(steps < 60, "the button never disappears");
        browser.value("document.getElementById('more').click()").await?;
    }
    let rows = "Object.fromEntries([...document.querySelectorAll('#recent tbody tr')].map((row) => [row.dataset.request,
        Object.fromEntries([...row.querySelectorAll('[data-field]')].map((cell) => [cell.dataset.field, cell.textContent]))]))";
    let rows = browser.value(rows).await?;
    assert_eq!(rows.as_object().context("the rows are not a list")?.len(), 61);
    let mut answered = 0;
    for line in client.lines() {
        let (Some(id), Some(answer)) = (line.request_id, line.usage) else { continue };
        let row = &rows[format!("{id}-0")];
        let number = |field: &str| row[field].as_str().and_then(|text| text.replace(',', "").parse::<u64>().ok());
        assert_eq!((number("prompt_tokens"), number("cached_tokens")), (Some(answer.prompt_tokens), Some(answer.cached_tokens)));
        assert_eq!((&row["status"], &row["decode_worker"]), (&json!("200"), &json!(DECODE)), "{row}");
        answered += 1;
    }
    assert_eq!(answered, 60);
    let disconnected = rows.as_object().into_iter().flatten().filter(|(_, row)| row["status"] == "client disconnected").count();
    assert_eq!(disconnected, 1);
    Ok(())
}

/// Asserts that the request which was refused is listed.
async fn shows_refused_requests(browser: &mut Browser) -> Result<()> {
    browser.until("document.querySelectorAll('#refused tbody tr').length === 1").await?;
    let cells = "Object.fromEntries([...document.querySelectorAll('#refused [data-field]')].map((cell) => [cell.dataset.field, cell.textContent]))";
    let row = browser.value(cells).await?;
    let shown = ["endpoint", "status", "code"].map(|field| row[field].clone());
    assert_eq!(shown, [json!(Endpoint::Chat.path()), json!("400"), json!("invalid_value")], "{row}");
    Ok(())
}

/// Asserts that each term of the page has a tooltip.
async fn explains_every_term(browser: &mut Browser) -> Result<()> {
    let without = "[...document.querySelectorAll('thead th, dt, h3, .badge, #steps tbody th')].filter((term) => !term.title).map((term) => term.textContent)";
    assert_eq!(browser.value(without).await?, json!([]));
    Ok(())
}

/// Opens the page again, and asserts that its charts have points from before it was opened.
async fn shows_the_history(browser: &mut Browser) -> Result<()> {
    let url = browser.value("location.href").await?;
    browser.open(url.as_str().context("the page has no URL")?).await?;
    browser.until("document.getElementById('state')?.textContent === 'Ready'").await?;
    for chart in ["hit-rate", "overlap-blocks"] {
        // A single point is drawn as a dot.
        browser.until(&format!("document.querySelectorAll('#{chart} .dot, #{chart} .line').length > 0")).await?;
    }
    Ok(())
}

/// Asserts that the page can be used with the keyboard: Tab selects a request, Enter opens its timeline, Escape closes it.
async fn works_by_keyboard(browser: &mut Browser) -> Result<()> {
    browser.value("document.getElementById('order').value = 'total'").await?;
    browser.value("document.getElementById('order').dispatchEvent(new Event('change'))").await?;
    let focus = "document.activeElement?.closest('#recent tbody tr')?.dataset.request ?? document.activeElement?.id ?? ''";
    let mut visited = Vec::new();
    let request = loop {
        browser.press("Tab").await?;
        let at = browser.value(focus).await?.as_str().unwrap_or_default().to_owned();
        if at.ends_with("-0") {
            break at;
        }
        visited.push(at);
        ensure!(visited.len() < 60, "Tab does not lead to a request: {visited:?}");
    };
    for stop in ["pause", "order", "filter"] {
        ensure!(visited.iter().any(|at| at == stop), "Tab does not lead to {stop}: {visited:?}");
    }
    let outlined = browser.value("getComputedStyle(document.activeElement).outlineStyle").await?;
    ensure!(outlined == "solid", "the focused element has no outline: {outlined}");
    browser.press("Enter").await?;
    browser.until("document.getElementById('request').open").await?;
    assert_eq!(browser.value("document.getElementById('request-title').textContent").await?, format!("Request {request}"));
    let steps = browser.value("[...document.querySelectorAll('#steps tbody tr')].map((row) => row.dataset.phase)").await?;
    assert_eq!(steps, json!(["read", "route", "queue", "prefill", "transfer", "first", "decode"]));
    browser.press("Tab").await?;
    ensure!(browser.value("document.getElementById('request').contains(document.activeElement)").await? == true);
    explains_every_term(browser).await?;
    if let Ok(folder) = std::env::var("PAGE_SHOTS") {
        std::fs::write(format!("{folder}/timeline.png"), browser.picture(false).await?)?;
    }
    browser.press("Escape").await?;
    browser.until("!document.getElementById('request').open").await?;
    assert_eq!(browser.value(focus).await?, request, "the focus returns to the request");
    Ok(())
}

/// Asserts that a request's timeline shows the chunks in which its prompt was computed.
async fn shows_chunks(browser: &mut Browser, client: &Client) -> Result<()> {
    let remembered: Value = serde_json::from_str(&client.get("/dashboard/requests").await?.1)?;
    let chunks = |request: &Value| request["steps"]["chunks"].as_array().cloned().unwrap_or_default();
    let cut = remembered["requests"].as_array().into_iter().flatten().max_by_key(|request| chunks(request).len());
    let cut = cut.context("the page shows no requests")?;
    let shown_tokens: Vec<Value> = chunks(cut).iter().map(|chunk| chunk["tokens"].clone()).collect();
    ensure!(
        shown_tokens.len() > 2 && shown_tokens.contains(&json!(cluster::CHUNK_BUDGET)),
        "prompts are longer than a chunk: {shown_tokens:?}"
    );
    let filter = |by: &Value| {
        format!("filter = document.getElementById('filter'), filter.value = {by}, filter.dispatchEvent(new Event('input'))")
    };
    browser.value(&filter(&cut["request_id"])).await?;
    browser.value("document.querySelector('#recent tbody button').click()").await?;
    browser.until("document.getElementById('request').open").await?;
    browser.value("document.querySelector('#request summary').click()").await?;
    let shown =
        "[...document.querySelectorAll('#chunks tbody tr')].map((row) => Number(row.lastChild.textContent.replace(',', '')))";
    assert_eq!(browser.value(shown).await?, json!(shown_tokens));
    if let Ok(folder) = std::env::var("PAGE_SHOTS") {
        std::fs::write(format!("{folder}/chunks.png"), browser.picture(false).await?)?;
    }
    browser.press("Escape").await?;
    browser.until("!document.getElementById('request').open").await?;
    // The filter must be removed for the checks that follow.
    browser.value(&filter(&json!(""))).await?;
    Ok(())
}

/// Asserts that the page shows the same explanation of a placement as the API.
async fn explains(browser: &mut Browser, client: &Client) -> Result<()> {
    let text = format!("{}{SECRET} again", prose("3", 280));
    let body = Endpoint::Completions.request(MODEL, &text, json!({ "max_tokens": 1 }));
    let expected = client.explain(Endpoint::Completions.path(), &body).await?["prompts"][0].clone();
    assert_eq!(browser.value("document.getElementById('explain-model').value").await?, MODEL);
    browser.value("document.getElementById('prompt').focus()").await?;
    browser.write(&text).await?;
    let mut steps = 0;
    while browser.value("document.activeElement.type").await? != "submit" {
        steps += 1;
        ensure!(steps < 60, "Tab does not lead to the button");
        browser.press("Tab").await?;
    }
    browser.press("Enter").await?;
    browser.until("document.querySelector('#explained .explanation') !== null").await?;
    // Costs depend on the latest placements, so they differ a little from moment to moment.
    let without_costs = |text: &Value| {
        let words: Vec<&str> = text.as_str().unwrap_or_default().split(' ').collect();
        let kept = (0..words.len()).filter(|at| !words.get(at + 1).is_some_and(|next| next.starts_with("ms")));
        kept.map(|at| words[at]).collect::<Vec<_>>().join(" ")
    };
    let shown = browser.value("document.querySelector('#explained .explanation').textContent").await?;
    assert_eq!(without_costs(&shown), without_costs(&expected["explanation"]));
    browser.until("document.querySelector('#explained').getBoundingClientRect().top < innerHeight - 40").await?;
    let chosen = "[...document.querySelectorAll('#costs .chosen th')].map((head) => head.firstChild.textContent)";
    let prefill = expected["prefill_worker"].as_str().context("no prefill worker was chosen")?;
    assert_eq!(browser.value(chosen).await?, json!([format!("{prefill} prefills"), format!("{DECODE} receives")]));
    Ok(())
}

/// Asserts that Explain has a field for the API key if the server wants one, and sends the key.
async fn explains_with_a_key(browser: &mut Browser) -> Result<()> {
    let wants_a_key = r#"const served = window.fetch;
        window.fetch = async (path, options) => path.startsWith('v1/') && options.headers.authorization !== 'Bearer a-key'
            ? new Response('{"error": {"message": "this server wants a key"}}', { status: 401 }) : served(path, options);
        0"#;
    browser.value(wants_a_key).await?;
    assert_eq!(browser.value("document.getElementById('key-part').hidden").await?, true);
    let ask = "document.querySelector('#explain-form [type=submit]').click()";
    browser.value(ask).await?;
    let refused = "document.querySelector('#explained .problem')?.textContent === 'Explain failed: this server wants a key'";
    browser.until(&format!("{refused} && !document.getElementById('key-part').hidden")).await?;
    browser.value("document.getElementById('key').focus()").await?;
    browser.write("a-key").await?;
    browser.value(ask).await?;
    browser.until("document.querySelector('#explained .explanation') !== null").await
}

/// Asserts that names and prompts are escaped, and that the content security policy blocks injected scripts and connections to other
/// origins.
async fn blocks_injected_scripts(browser: &mut Browser, client: &Client) -> Result<()> {
    assert_eq!(browser.value("document.getElementById('model').textContent").await?, MODEL);
    let markup = "document.querySelectorAll('img').length + document.querySelectorAll('body script').length";
    assert_eq!(
        (browser.value(markup).await?, browser.value("document.title").await?),
        (json!(0), json!(format!("Tandem – {MODEL}")))
    );
    for path in ["/dashboard", "/dashboard/cluster", "/dashboard/requests", "/dashboard/history", "/dashboard/breakers"] {
        ensure!(!client.get(path).await?.1.contains(SECRET), "{path} contains a prompt's text");
    }
    for forbidden in ["eval('1')", "document.body.innerHTML = '<b>x</b>'", "document.createElement('script').text = '1'"] {
        ensure!(browser.value(forbidden).await.is_err(), "{forbidden} does not fail");
    }
    // The policy must forbid the connection, whether or not the port is open.
    let elsewhere = "new Promise((done) => {
        document.addEventListener('securitypolicyviolation', (event) => {
            if (event.effectiveDirective === 'connect-src') done(event.blockedURI);
        });
        fetch('http://127.0.0.1:1/').catch(() => {}).then(() => setTimeout(() => done('let out'), 10_000));
    })";
    let forbidden = browser.value(elsewhere).await?;
    ensure!(forbidden.as_str().is_some_and(|url| url.starts_with("http://127.0.0.1:1")), "connect-src: {forbidden}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn dashboard_matches_metrics_in_a_real_browser() -> Result<()> {
    let (_cluster, address) = cluster::start(MODEL, &["prefill-0", "prefill-1"], &[DECODE]).await?;
    let client = Client::new(address);
    wait_until("the cluster is ready", async || {
        let seen: Value = serde_json::from_str(&client.get("/dashboard/cluster").await?.1)?;
        Ok(seen["workers"].as_array().is_some_and(|workers| workers.len() == WORKERS.len())
            && seen["unavailable_reason"].is_null())
    })
    .await?;
    let mut browser = Browser::start().await?;
    browser.show(DESK, "light").await?;
    browser.open(&format!("http://{address}/dashboard")).await?;
    traffic(&client).await?;
    shows_the_cluster(&mut browser, &client).await?;
    shows_the_requests(&mut browser, &client).await?;
    shows_refused_requests(&mut browser).await?;
    works_by_keyboard(&mut browser).await?;
    shows_chunks(&mut browser, &client).await?;
    explains(&mut browser, &client).await?;
    explains_with_a_key(&mut browser).await?;
    explains_every_term(&mut browser).await?;
    // The explanation and the timeline are opened, so that their tables are checked as well.
    browser.value("document.querySelector('#recent tbody button').click()").await?;
    looks::are_good(&mut browser, "timeline").await?;
    browser.press("Escape").await?;
    looks::are_good(&mut browser, "dashboard").await?;
    shows_the_history(&mut browser).await?;
    why::is_shown(&mut browser, &client).await?;
    assert_eq!(browser.console_errors(), [] as [String; 0]);
    blocks_injected_scripts(&mut browser, &client).await
}
