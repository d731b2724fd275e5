//! Checks what the dashboard shows about tokens that were not cached.

use crate::browser::Browser;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tandem_tests::Client;

/// Asserts that the funnel has the sums of the frontend's history, that each worker's causes and found tokens are its prompts, and that a
/// request's timeline has a sentence with its cached tokens.
pub async fn is_shown(browser: &mut Browser, client: &Client) -> Result<()> {
    browser.until("!document.getElementById('why').hidden && document.querySelectorAll('#causes tbody tr').length > 0").await?;
    let history: Value = serde_json::from_str(&client.get("/dashboard/history").await?.1)?;
    let periods = history["periods"].as_array().context("there is no history")?;
    let sums = periods.iter().flat_map(|period| period["workers"].as_object().into_iter().flatten());
    let found: u64 = sums.filter_map(|(_, sums)| sums["found_tokens"].as_u64()).sum();
    let shown = "document.querySelector('#funnel [data-stage=Found] dd').textContent.split(' ')[0].replaceAll(',', '')";
    assert_eq!(browser.value(shown).await?, json!(found.to_string()));
    let wrong = "[...document.querySelectorAll('#causes tbody tr')].map((row) => [...row.querySelectorAll('td')].map((cell) =>
        Number(cell.textContent.replaceAll(',', '')))).filter(([prompt, , , , ...parts]) => prompt !== parts.reduce((one, other) => one + other))";
    assert_eq!(browser.value(wrong).await?, json!([]));
    let answered = "[...document.querySelectorAll('#recent tbody tr')].find((row) => row.querySelector('[data-field=status]').textContent === '200')";
    browser.value(&format!("{answered}.querySelector('button').click()")).await?;
    browser.until("document.getElementById('request').open").await?;
    let sentence = browser.value("document.querySelector('#request [data-field=why]')?.textContent").await?;
    ensure!(
        sentence.as_str().is_some_and(|text| text.contains(" cached: ") && text.contains("after the last reusable block")),
        "{sentence}"
    );
    browser.press("Escape").await?;
    browser.until("!document.getElementById('request').open").await
}
