//! Tables for the operator, with columns aligned by spaces and without borders, and counts in sentences.

use comfy_table::{CellAlignment, Table, presets::NOTHING};
use std::fmt::Display;

/// Returns a count and its noun: `1 answer`, `2 answers`.
pub(crate) fn counted<N: Display + From<u8> + PartialEq>(count: N, noun: &str) -> String {
    format!("{count} {noun}{}", if count == N::from(1) { "" } else { "s" })
}

/// Formats the rows, of which the first is the header. The first `left` columns are aligned to the left, the other columns to the right.
/// Every line ends with a newline.
pub(crate) fn text_table(rows: impl IntoIterator<Item = Vec<String>>, left: usize) -> String {
    text_table_with_gap(rows, left, 2)
}

/// Formats the rows as [`text_table`] does, with this number of spaces between columns.
pub(crate) fn text_table_with_gap(rows: impl IntoIterator<Item = Vec<String>>, left: usize, gap: u16) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).add_rows(rows);
    for (at, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, gap)).set_cell_alignment(if at < left { CellAlignment::Left } else { CellAlignment::Right });
    }
    table.trim_fmt() + "\n"
}
