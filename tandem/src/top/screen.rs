//! Shows the table in a terminal, and handles the keys.

use super::table::{Cell, Column, Table};
use ratatui::{
    Frame,
    crossterm::event::{KeyCode, KeyEvent, KeyModifiers},
    layout::{Constraint, Layout},
    style::{Style, Stylize},
    text::{Line, Text},
    widgets::{Paragraph, Row, Table as Grid},
};

pub(super) struct Screen {
    sort: Column,
    reverse: bool,
    above: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    Continue,
    Quit,
}

const KEYS: &str = "q quit   ← → sort by   r reverse   ↑ ↓ scroll";

impl Screen {
    pub(super) fn new(sort: Column, reverse: bool) -> Self {
        Self { sort, reverse, above: 0 }
    }

    pub(super) fn press(&mut self, key: KeyEvent) -> Flow {
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return Flow::Quit,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Flow::Quit,
            KeyCode::Right => self.sort = self.sort.step(1),
            KeyCode::Left => self.sort = self.sort.step(-1),
            KeyCode::Char('r') => self.reverse = !self.reverse,
            KeyCode::Down => self.above += 1,
            KeyCode::Up => self.above = self.above.saturating_sub(1),
            _ => {}
        }
        Flow::Continue
    }

    pub(super) fn sorted(&self, mut table: Table) -> Table {
        table.sort(self.sort, self.reverse);
        table
    }

    /// Draws the table. `problem` is the reason why the table is not up to date; `None` if it is up to date.
    pub(super) fn draw(&mut self, frame: &mut Frame<'_>, table: &Table, problem: Option<&str>) {
        let notes: Vec<Line<'_>> =
            problem.into_iter().chain(table.notes.iter().map(String::as_str)).map(|note| note.red().into()).collect();
        let notes_len = u16::try_from(notes.len()).unwrap_or(u16::MAX).min(frame.area().height / 3);
        let parts = [Constraint::Length(2), Constraint::Min(2), Constraint::Length(notes_len), Constraint::Length(1)];
        let [title, lines, below, keys] = Layout::vertical(parts).areas(frame.area());
        frame.render_widget(Paragraph::new(table.title.as_str().bold()), title);
        // At least one row stays visible.
        self.above = self.above.min(table.rows.len().saturating_sub(1));
        let rows = table.rows.iter().skip(self.above).map(|row| {
            let style = match &row[Column::Health as usize] {
                Cell::Text(health) if health == "healthy" => Style::new(),
                _ => Style::new().red(),
            };
            Row::new(row.iter().zip(Column::all()).map(|(cell, column)| aligned(cell.to_string(), *column))).style(style)
        });
        let heads = Column::all().iter().map(|&column| {
            let (arrow, style) = match (column == self.sort, self.reverse) {
                (false, _) => ("", Style::new()),
                (true, true) => ("▼", Style::new().bold()),
                (true, false) => ("▲", Style::new().bold()),
            };
            aligned(format!("{}{arrow}", column.head()), column).style(style)
        });
        let widths = Column::all().iter().map(|&column| {
            let longest = table.rows.iter().map(|row| row[column as usize].to_string().chars().count()).max().unwrap_or(0);
            Constraint::Length(u16::try_from(longest.max(column.head().len() + 1)).unwrap_or(u16::MAX))
        });
        let header = Row::new(heads).style(Style::new().reversed());
        frame.render_widget(Grid::new(rows, widths).header(header).column_spacing(1), lines);
        frame.render_widget(Paragraph::new(notes), below);
        frame.render_widget(Paragraph::new(KEYS.dim()), keys);
    }
}

fn aligned(text: String, column: Column) -> Text<'static> {
    if column.is_text() { Text::from(text) } else { Text::from(text).right_aligned() }
}

#[cfg(test)]
mod tests {
    use super::super::table::tests::table;
    use super::*;
    use ratatui::{Terminal, backend::TestBackend};

    fn drawn(screen: &mut Screen, problem: Option<&str>) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(130, 12)).expect("the test terminal does not fail");
        let table = screen.sorted(table());
        terminal.draw(|frame| screen.draw(frame, &table, problem)).expect("the test terminal does not fail");
        let buffer = terminal.backend().buffer();
        let cells: Vec<&str> = buffer.content().iter().map(|cell| cell.symbol()).collect();
        cells.chunks(130).map(|line| line.concat().trim_end().to_owned()).collect()
    }

    fn press(screen: &mut Screen, code: KeyCode) -> Flow {
        screen.press(KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn screen_shows_every_worker_and_its_problems() {
        let mut screen = Screen::new(Column::Worker, false);
        let lines = drawn(&mut screen, None);
        assert_eq!(lines[0], "blue serves m: 2 of 3 workers, 6 requests");
        assert!(lines[2].starts_with("worker▲") && lines[2].contains("hit rate"), "{lines:#?}");
        let workers: Vec<&str> = lines[3..6].iter().filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(workers, ["d0", "h:7100", "p0"]);
        assert!(lines[3].contains("circuit_open") && lines[5].contains("87.5%") && lines[5].contains("300"), "{lines:#?}");
        assert!(lines.iter().any(|line| line == "h:7100: another model"), "{lines:#?}");
        assert!(lines[11].contains("q quit"));
        let lines = drawn(&mut screen, Some("no router answers"));
        assert!(lines.iter().any(|line| line == "no router answers") && lines[5].contains("87.5%"), "{lines:#?}");
    }

    #[test]
    fn keys_sort_and_scroll_the_table_and_quit() {
        let mut screen = Screen::new(Column::Worker, false);
        for _ in 0..4 {
            assert_eq!(press(&mut screen, KeyCode::Right), Flow::Continue);
        }
        press(&mut screen, KeyCode::Char('r'));
        let lines = drawn(&mut screen, None);
        assert!(lines[2].contains("batch▼") && lines[3].starts_with("d0") && lines[4].starts_with("p0"), "{lines:#?}");
        press(&mut screen, KeyCode::Left);
        assert!(drawn(&mut screen, None)[2].contains("requests▼"));
        (0..9).for_each(|_| assert_eq!(press(&mut screen, KeyCode::Down), Flow::Continue));
        assert!(drawn(&mut screen, None)[3].starts_with("h:7100"), "the last row stays on the screen");
        (0..9).for_each(|_| assert_eq!(press(&mut screen, KeyCode::Up), Flow::Continue));
        assert!(drawn(&mut screen, None)[3].starts_with("d0"));
        assert_eq!(press(&mut screen, KeyCode::Char('q')), Flow::Quit);
        assert_eq!(press(&mut screen, KeyCode::Esc), Flow::Quit);
        assert_eq!(screen.press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)), Flow::Quit);
        assert_eq!(press(&mut screen, KeyCode::Char('c')), Flow::Continue);
    }
}
