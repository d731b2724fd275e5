//! Checks the look of the pages in each window: no element is wider than the window, no text is cut off, buttons are large enough for a
//! finger, and contrast is sufficient. If `TANDEM_AXE` is the path of axe-core's `axe.min.js`, its rules are checked, too; `ci/test.sh`
//! downloads it.

use crate::{DESK, PHONE, browser::Browser};
use anyhow::{Context, Result};
use serde_json::json;

const PROBLEMS: &str = include_str!("looks.js");
/// Returns the violations of axe's rules, each with the elements that violate it.
const AXE: &str = "axe.run().then(({ violations }) =>
    violations.flatMap(({ id, nodes }) => nodes.map(({ target, failureSummary }) => `${id}: ${target}: ${failureSummary}`)))";

/// Asserts that the page that is open looks as it should in each window and colour scheme. With `PAGE_SHOTS`, writes pictures of this name.
pub async fn are_good(browser: &mut Browser, name: &str) -> Result<()> {
    let axe = match std::env::var("TANDEM_AXE") {
        Ok(path) => Some(std::fs::read_to_string(&path).with_context(|| format!("TANDEM_AXE is {path}"))?),
        Err(_) => None,
    };
    for (window, size) in [("desk", DESK), ("phone", PHONE)] {
        for scheme in ["light", "dark"] {
            let state = format!("{name}-{window}-{scheme}");
            browser.show(size, scheme).await?;
            browser.until(&format!("window.innerWidth === {}", size.0)).await?;
            let back = browser.value("getComputedStyle(document.body).backgroundColor").await?;
            assert_eq!(back, if scheme == "dark" { "rgb(18, 22, 27)" } else { "rgb(246, 247, 249)" }, "{state}");
            // The charts are redrawn when the width changes.
            browser.until("document.documentElement.scrollWidth <= window.innerWidth").await?;
            if let Ok(folder) = std::env::var("PAGE_SHOTS") {
                std::fs::write(format!("{folder}/{state}.png"), browser.picture(name == "dashboard").await?)?;
            }
            assert_eq!(browser.value(PROBLEMS).await?, json!([]), "{state}");
            if let Some(axe) = &axe {
                browser.value(&format!("{axe}; 0")).await?;
                assert_eq!(browser.value(AXE).await?, json!([]), "{state}");
            }
        }
    }
    browser.show(DESK, "light").await
}
