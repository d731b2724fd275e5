//! Adds the checks of [`limits`](super::limits) to a compiled template.

use super::{
    environment,
    limits::{MADE, MEMBER, MULTIPLYING, OPERANDS, SLICED, TICK, VARIABLE},
};
use minijinja::{
    Error, ErrorKind, Value,
    machinery::{CodeGenerator, Instruction, Instructions, Token, parse, tokenize},
};
use std::collections::BTreeMap;

/// The engine caches the filters that a rendering has looked up in 50 slots. The slots from this one on are used for the checks.
const FIRST_PLACE: u8 = 44;
const NO_PLACE: u8 = !0;

/// Passes a factor of each product through a filter, so that the compiler cannot compute a huge product of constants.
///
/// # Errors
/// The template is malformed.
pub(super) fn rewrite(source: &str) -> Result<String, Error> {
    let (mut rewritten, mut copied, mut before) = (String::with_capacity(source.len() * 2), 0, None);
    for token in tokenize(source, false, environment::syntax()?) {
        let (token, span) = token?;
        let is_operator = !matches!(before, None | Some(Token::ParenOpen | Token::Comma));
        if matches!(token, Token::Mul) && is_operator {
            let at = span.start_offset as usize;
            rewritten = rewritten + &source[copied..at] + "|" + TICK + " ";
            copied = at;
        }
        before = Some(token);
    }
    Ok(rewritten + &source[copied..])
}

/// A compiled template with its checks.
pub(super) struct Program {
    pub(super) main: Instructions<'static>,
    pub(super) blocks: BTreeMap<&'static str, Instructions<'static>>,
}

/// Compiles a template, and adds the checks. The program borrows the text: a model is loaded once and served until the process ends.
///
/// # Errors
/// The template is malformed, or passes a list as the arguments of an operation that multiplies.
pub(super) fn compile(name: &'static str, source: String) -> Result<Program, Error> {
    let source: &'static str = source.leak();
    let mut generator = CodeGenerator::new(name, source);
    generator.compile_stmt(&parse(source, name, environment::syntax()?)?);
    let (main, blocks) = generator.finish();
    let blocks = blocks.iter().map(|(name, block)| Ok((*name, checked(block)?))).collect::<Result<_, Error>>()?;
    Ok(Program { main: checked(&main)?, blocks })
}

fn checked(instructions: &Instructions<'static>) -> Result<Instructions<'static>, Error> {
    let mut checked: Vec<(Instruction<'static>, u16)> = Vec::new();
    // For each original instruction, the index in `checked` of the first instruction that replaces it.
    let mut starts: Vec<u32> = Vec::new();
    for at in 0.. {
        starts.push(checked.len() as u32);
        let Some(instruction) = instructions.get(at) else { break };
        let line = instructions.get_line(at).map_or(0, |line| line as u16);
        checked.extend(with_checks(instruction)?.into_iter().map(|instruction| (instruction, line)));
    }
    let mut result = Instructions::new(instructions.name(), instructions.source());
    for (mut instruction, line) in checked {
        if let Instruction::Iterate(target)
        | Instruction::Jump(target)
        | Instruction::JumpIfFalse(target)
        | Instruction::JumpIfFalseOrPop(target)
        | Instruction::JumpIfTrueOrPop(target)
        | Instruction::BuildMacro(_, target, _) = &mut instruction
        {
            *target = starts[*target as usize];
        }
        result.add_with_line(instruction, line);
    }
    Ok(result)
}

fn with_checks(instruction: &Instruction<'static>) -> Result<Vec<Instruction<'static>>, Error> {
    use Instruction as I;
    let check = |name: &'static str| {
        let place = [VARIABLE, MEMBER, MADE, SLICED, TICK, OPERANDS].iter().position(|filter| *filter == name).unwrap_or(0) as u8;
        I::ApplyFilter(name, Some(1), FIRST_PLACE + place)
    };
    let operands = |name: &str, count: usize| {
        [I::LoadConst(Value::from(name)), I::BuildTuple(Some(count + 1)), check(OPERANDS), I::UnpackList(count)]
    };
    let mut own = instruction.clone();
    if let I::ApplyFilter(_, _, place @ FIRST_PLACE..) = &mut own {
        *place = NO_PLACE;
    }
    Ok(match &own {
        // Emitted text is counted by the formatter, so raw text goes through it as well.
        I::EmitRaw(text) => vec![I::LoadConst(Value::from(*text)), I::Emit],
        I::StoreLocal(_) => vec![check(VARIABLE), own],
        I::SetAttr(_) => vec![I::Swap, check(MEMBER), I::Swap, own],
        I::Iterate(_) => vec![I::LoadConst(Value::from(true)), check(TICK), I::DiscardTop, own],
        I::Mul => operands("*", 2).into_iter().chain([own, check(MADE)]).collect(),
        I::ApplyFilter(name, count, _) | I::CallMethod(name, count) if MULTIPLYING.contains(name) => {
            let count = count.ok_or_else(|| {
                Error::new(
                    ErrorKind::InvalidOperation,
                    format!("'{name}' with '*' before an argument is not supported in a chat template"),
                )
            })?;
            operands(name, count.into()).into_iter().chain([own.clone(), check(MADE)]).collect()
        }
        I::ApplyFilter(..) | I::CallMethod(..) | I::CallFunction(..) | I::CallObject(_) => vec![own, check(MADE)],
        I::Add | I::StringConcat | I::BuildMap(_) | I::BuildList(_) | I::BuildTuple(_) => vec![own, check(MADE)],
        I::Slice => vec![own, check(SLICED)],
        I::Eq | I::Ne | I::Gt | I::Gte | I::Lt | I::Lte | I::In | I::CompareAndPreserve(_) | I::PerformTest(..) => {
            vec![own, check(TICK)]
        }
        _ => vec![own],
    })
}
