//! Shows the table in a terminal, and handles the keys. A narrow terminal has fewer columns.

use super::table::{Cell, Column, SortOrder, TextTable, wrapped};
use ratatui::{
    Frame,
    crossterm::event::{KeyCode, KeyEvent, KeyModifiers},
    layout::{Constraint, Layout},
    style::{Style, Stylize},
    text::{Line, Text},
    widgets::{Paragraph, Row, Table},
};
use std::time::Duration;

pub(super) struct Screen {
    order: SortOrder,
    above: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyAction {
    Continue,
    Quit,
}

/// The keys and what they do. No line ends within a pair, which has no-break spaces.
const KEYS: &str = "q\u{a0}quit   ←\u{a0}→\u{a0}sort\u{a0}by   r\u{a0}reverse   ↑\u{a0}↓\u{a0}scroll";

impl Screen {
    pub(super) fn new(order: SortOrder) -> Self {
        Self { order, above: 0 }
    }

    pub(super) fn press(&mut self, key: KeyEvent) -> KeyAction {
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return KeyAction::Quit,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return KeyAction::Quit,
            KeyCode::Right => self.order.by = self.order.by.step(1),
            KeyCode::Left => self.order.by = self.order.by.step(-1),
            KeyCode::Char('r') => self.order.reverse = !self.order.reverse,
            KeyCode::Down => self.above += 1,
            KeyCode::Up => self.above = self.above.saturating_sub(1),
            _ => {}
        }
        KeyAction::Continue
    }

    pub(super) fn sorted(&self, mut table: TextTable) -> TextTable {
        table.sort(self.order);
        table
    }

    /// Draws the table. `stale` is the reason why the table is not up to date, and its age; `None` if it is up to date.
    pub(super) fn draw(&mut self, frame: &mut Frame<'_>, table: &TextTable, stale: Option<(&str, Duration)>) {
        let width = usize::from(frame.area().width);
        let problem = stale.map(|(problem, _)| problem);
        let notes = problem.into_iter().chain(table.notes.iter().map(String::as_str)).flat_map(|note| wrapped(note, width));
        let notes: Vec<Line<'_>> = notes.map(|line| line.red().into()).collect();
        let notes_len = u16::try_from(notes.len()).unwrap_or(u16::MAX).min(frame.area().height / 3);
        let (columns, table) = table.fitted(width, self.order.by);
        let hidden = Column::all().len() - columns.len();
        let more = if hidden == 0 { String::new() } else { format!("   {hidden}\u{a0}columns\u{a0}hidden") };
        let keys: Vec<Line<'_>> = wrapped(&format!("{KEYS}{more}"), width).into_iter().map(|line| line.dim().into()).collect();
        let age = stale.map_or_else(String::new, |(_, age)| format!("not up to date, from {} s ago: ", age.as_secs()));
        let title: Vec<Line<'_>> = wrapped(&(age + &table.title), width).into_iter().map(|line| line.bold().into()).collect();
        let (above, under) =
            (Constraint::Length((title.len() as u16).min(frame.area().height / 3).max(2)), Constraint::Length(keys.len() as u16));
        let parts = [above, Constraint::Min(3), Constraint::Length(notes_len), under];
        let [above, lines, below, under] = Layout::vertical(parts).areas(frame.area());
        frame.render_widget(Paragraph::new(title), above);
        // At least one row stays visible.
        self.above = self.above.min(table.rows.len().saturating_sub(1));
        let rows = table.rows.iter().skip(self.above).map(|row| {
            let style = match &row[Column::Health as usize] {
                Cell::Text(health) if health == "healthy" => Style::new(),
                _ => Style::new().red(),
            };
            Row::new(columns.iter().map(|&column| aligned(row[column as usize].to_string(), column))).style(style)
        });
        let heads = columns.iter().map(|&column| {
            let (arrow, style) = match (column == self.order.by, self.order.reverse) {
                (false, _) => ("", Style::new()),
                (true, true) => ("▼", Style::new().bold()),
                (true, false) => ("▲", Style::new().bold()),
            };
            let [upper, lower] = column.head();
            aligned(format!("{upper}{arrow}\n{lower}"), column).style(style)
        });
        let widths = columns
            .iter()
            .map(|&column| Constraint::Length(u16::try_from(table.width(column, self.order.by)).unwrap_or(u16::MAX)));
        let header = Row::new(heads).height(2).style(Style::new().reversed());
        frame.render_widget(Table::new(rows, widths).header(header).column_spacing(1), lines);
        frame.render_widget(Paragraph::new(notes), below);
        frame.render_widget(Paragraph::new(keys), under);
    }
}

fn aligned(text: String, column: Column) -> Text<'static> {
    if column.is_text() { Text::from(text) } else { Text::from(text).right_aligned() }
}

#[cfg(test)]
mod tests {
    use super::super::table::tests::{cluster, table};
    use super::*;
    use ratatui::{Terminal, backend::TestBackend};

    fn drawn(screen: &mut Screen, problem: Option<&str>) -> Vec<String> {
        drawn_at(130, screen, &table(), problem)
    }

    fn drawn_at(width: u16, screen: &mut Screen, table: &TextTable, problem: Option<&str>) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, 13)).expect("the test terminal does not fail");
        let table = screen.sorted(table.clone());
        let stale = problem.map(|problem| (problem, Duration::from_secs(7)));
        terminal.draw(|frame| screen.draw(frame, &table, stale)).expect("the test terminal does not fail");
        let buffer = terminal.backend().buffer();
        let cells: Vec<&str> = buffer.content().iter().map(|cell| cell.symbol()).collect();
        cells.chunks(width.into()).map(|line| line.concat().trim_end().to_owned()).collect()
    }

    fn press(screen: &mut Screen, code: KeyCode) -> KeyAction {
        screen.press(KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn screen_shows_every_worker_and_its_problems() {
        let mut screen = Screen::new(SortOrder::default());
        let lines = drawn(&mut screen, None);
        assert_eq!(lines[0], "blue serves m: 2 of 3 workers, 6 requests running");
        assert!(lines[2].starts_with("worker▲") && lines[2].contains(" hit "), "{lines:#?}");
        let of_heads: Vec<&str> = lines[3].split_whitespace().collect();
        assert_eq!(of_heads[..4], ["requests", "sequences", "requests", "rate"]);
        let workers: Vec<&str> = lines[4..7].iter().filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(workers, ["d0", "h:7100", "p0"]);
        assert!(lines[4].contains("circuit_open") && lines[6].contains("87.5%") && lines[6].contains("300"), "{lines:#?}");
        assert!(lines.iter().any(|line| line == "h:7100: another model"), "{lines:#?}");
        assert!(lines[12] == KEYS);
        let lines = drawn(&mut screen, Some("no router answers"));
        assert!(lines.iter().any(|line| line == "no router answers") && lines[6].contains("87.5%"), "{lines:#?}");
        assert_eq!(lines[0], "not up to date, from 7 s ago: blue serves m: 2 of 3 workers, 6 requests running");
    }

    #[test]
    fn keys_sort_and_scroll_the_table_and_quit() {
        let mut screen = Screen::new(SortOrder::default());
        for _ in 0..4 {
            assert_eq!(press(&mut screen, KeyCode::Right), KeyAction::Continue);
        }
        press(&mut screen, KeyCode::Char('r'));
        let lines = drawn(&mut screen, None);
        assert!(lines[2].contains("running▼") && lines[4].starts_with("d0") && lines[5].starts_with("p0"), "{lines:#?}");
        press(&mut screen, KeyCode::Left);
        assert!(drawn(&mut screen, None)[2].contains("placed▼"));
        (0..9).for_each(|_| assert_eq!(press(&mut screen, KeyCode::Down), KeyAction::Continue));
        assert!(drawn(&mut screen, None)[4].starts_with("h:7100"), "the last row stays on the screen");
        (0..9).for_each(|_| assert_eq!(press(&mut screen, KeyCode::Up), KeyAction::Continue));
        assert!(drawn(&mut screen, None)[4].starts_with("d0"));
        assert_eq!(press(&mut screen, KeyCode::Char('q')), KeyAction::Quit);
        assert_eq!(press(&mut screen, KeyCode::Esc), KeyAction::Quit);
        assert_eq!(screen.press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)), KeyAction::Quit);
        assert_eq!(press(&mut screen, KeyCode::Char('c')), KeyAction::Continue);
    }

    #[test]
    fn terminal_of_80_columns_shows_whole_columns_and_notes() {
        let mut cluster = cluster(2);
        cluster.workers[0].info.as_mut().expect("it is set").worker_id = "prefill-0".to_owned();
        cluster.workers[1].circuit_open = false;
        cluster.unavailable[0].reason =
            "the process's model is another, but the cluster's is this one; stop it, or give it a port of its own".to_owned();
        let table = TextTable::new(&cluster, &cluster, Duration::from_secs(2));
        let mut screen = Screen::new(SortOrder { by: Column::CachedTokens, ..SortOrder::default() });
        let lines = drawn_at(80, &mut screen, &table, None);
        let heads = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
        assert_eq!(heads(&lines[2]), "worker health running queued hit cached▲ prefill decode", "{lines:#?}");
        assert_eq!(heads(&lines[3]), "sequences requests rate tokens tokens/s tokens/s");
        assert!(
            lines.iter().any(|line| line.ends_with("stop it,")) && lines.iter().any(|line| line.contains("of its own")),
            "{lines:#?}"
        );
        assert!(lines[12].ends_with("6\u{a0}columns\u{a0}hidden"), "{lines:#?}");
        for width in [20, 60, 100] {
            drawn_at(width, &mut screen, &table, None);
        }
        let lines = drawn_at(40, &mut Screen::new(SortOrder::default()), &table, None);
        assert_eq!(lines[..2].join(" "), table.title);
        assert_eq!(heads(&lines[2]), "worker▲ health queued hit", "{lines:#?}");
        assert_eq!(heads(&lines[11..].join(" ")), heads(&format!("{KEYS}   10 columns hidden")));
    }

    #[test]
    fn every_column_but_the_essential_ones_may_be_left_out() {
        let essential = [Column::Worker, Column::Health, Column::HitRate];
        let all: Vec<&Column> = Column::all()
            .iter()
            .filter(|column| essential.contains(column) || Column::LEAST_IMPORTANT.contains(column))
            .collect();
        assert_eq!(all.len(), Column::all().len());
        assert_eq!(essential.len() + Column::LEAST_IMPORTANT.len(), Column::all().len());
    }
}
