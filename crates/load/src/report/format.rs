//! Formats numbers for human readers.

/// Returns a whole number with thousands separators: `12,345`.
pub(super) fn whole(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Returns a number with about three significant digits: `0.12`, `3.45`, `67.8`, `910`, `12,345`.
pub(super) fn decimal(number: f64) -> String {
    match number.abs() {
        size if size < 9.995 => format!("{number:.2}"),
        size if size < 99.95 => format!("{number:.1}"),
        size if size < 1e15 => whole(size.round() as u64),
        _ => format!("{number:.2e}"),
    }
}

/// Returns a share of 1 as a percentage, rounded: `12.3%`.
pub(super) fn rounded_percent(share: f64) -> String {
    format!("{:.1}%", share * 100.0)
}

/// Returns a share of 1 as a percentage: `12.3%`. It is rounded down, so that it never equals a limit above it.
pub fn percent(share: f64) -> String {
    format!("{:.1}%", (share * 1000.0 + 1e-9).floor() / 10.0)
}

/// Returns a count and its noun: `1 answer`, `2 answers`.
pub(super) fn counted(count: u64, noun: &str) -> String {
    format!("{} {noun}{}", whole(count), if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_rounded_and_have_thousands_separators() {
        for (number, text) in [(0, "0"), (999, "999"), (1_000, "1,000"), (1_234_567, "1,234,567"), (100_000, "100,000")] {
            assert_eq!(whole(number), text);
        }
        for (number, text) in [
            (0.0, "0.00"),
            (9.994, "9.99"),
            (9.996, "10.0"),
            (99.94, "99.9"),
            (99.96, "100"),
            (12_345.4, "12,345"),
            (1e18, "1.00e18"),
        ] {
            assert_eq!(decimal(number), text);
        }
        assert_eq!(
            (percent(0.1234), percent(0.9168), percent(0.29), counted(1, "answer"), counted(1_200, "answer")),
            ("12.3%".to_owned(), "91.6%".to_owned(), "29.0%".to_owned(), "1 answer".to_owned(), "1,200 answers".to_owned())
        );
        assert_eq!(rounded_percent(0.9168), "91.7%");
    }
}
