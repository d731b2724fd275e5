use super::*;

fn samples(count: u32, stop: &[&str], sampling: Sampling) -> Samples {
    let stop: Vec<String> = stop.iter().map(|stop| (*stop).to_owned()).collect();
    Samples::new(Arc::new(ServedModel::sim("m")), count, &stop, TextOptions::default(), &sampling, LogprobsWith::Text, None)
}

fn tokens(sample: u32, bytes: &[u8]) -> Message {
    let token = |byte: &u8| Token { token: (*byte).into(), logprob: Some(-1.0), top: Vec::new() };
    Message::Tokens(Tokens { sample, tokens: bytes.iter().map(token).collect() })
}

fn finished(sample: u32, reason: finished::FinishReason, stop_token: Option<u32>) -> Message {
    Message::Finished(Finished { sample, reason: reason.into(), stop_token, stop_logprobs: None })
}

/// Applies the replies, and returns `(sample, text, tokens, finish)` of every resulting delta.
fn deltas(samples: &mut Samples, replies: Vec<Message>) -> Vec<(u32, String, u32, Option<FinishReason>)> {
    for reply in replies {
        samples.apply(reply).expect("the replies are valid");
    }
    let delta = |event| match event {
        AnswerEvent::Delta(delta) => (delta.sample, delta.text, delta.token_ids.len() as u32, delta.finish),
        _ => panic!("only deltas are expected"),
    };
    samples.events.drain(..).map(delta).collect()
}

#[test]
fn stop_string_ends_the_sample_and_its_last_token_counts() {
    let mut samples = samples(2, &["END"], Sampling::default());
    let got = deltas(&mut samples, vec![tokens(0, b"abE"), tokens(0, b"N"), tokens(0, b"Dxy"), tokens(0, b"z"), tokens(1, b"E")]);
    assert_eq!(
        got,
        [
            (0, "ab".into(), 3, None),
            (0, String::new(), 1, None),
            (0, String::new(), 1, Some(FinishReason::Stop)),
            (1, String::new(), 1, None)
        ]
    );
    assert!(!samples.all_ended());
    // A reply for a sample that has ended must change nothing. The other sample emits the text that was held back.
    let length = finished::FinishReason::Length;
    let got = deltas(&mut samples, vec![finished(0, length, None), finished(1, length, None)]);
    assert_eq!(got, [(1, "E".into(), 0, Some(FinishReason::Length))]);
    assert!(samples.all_ended());
}

#[test]
fn last_delta_has_the_stop_string_that_ended_the_sample() {
    let last = |stop: &[&str], replies: Vec<Message>| {
        let mut samples = samples(1, stop, Sampling::default());
        replies.into_iter().for_each(|reply| samples.apply(reply).expect("the replies are valid"));
        let Some(AnswerEvent::Delta(delta)) = samples.events.pop_back() else { panic!("the last event is a delta") };
        (delta.finish, delta.stop_string)
    };
    let stopped = Some(FinishReason::Stop);
    assert_eq!(last(&["xx", "ND"], vec![tokens(0, b"aND")]), (stopped, Some("ND".to_owned())));
    assert_eq!(last(&["ND"], vec![tokens(0, b"aN"), finished(0, finished::FinishReason::Stop, Some(257))]), (stopped, None));
}

#[test]
fn stop_and_special_tokens_count_as_completion_tokens_without_text() {
    const EOS: u32 = tandem_model::sim::IM_END;
    let mut samples = samples(1, &[], Sampling::default());
    let special = Token { token: tandem_model::sim::IM_START, ..Token::default() };
    let special = Message::Tokens(Tokens { sample: 0, tokens: vec![special] });
    let got = deltas(&mut samples, vec![tokens(0, b"ab"), special, finished(0, finished::FinishReason::Stop, Some(EOS))]);
    assert_eq!(got, [(0, "ab".into(), 2, None), (0, String::new(), 1, None), (0, String::new(), 1, Some(FinishReason::Stop))]);
}

#[test]
fn token_ids_include_the_stop_token_and_the_tokens_of_a_stop_string_but_none_after_it() {
    let ids = |samples: &mut Samples, replies: Vec<Message>| -> Vec<TokenId> {
        replies.into_iter().for_each(|reply| samples.apply(reply).expect("the replies are valid"));
        let of = |event| if let AnswerEvent::Delta(delta) = event { delta.token_ids } else { Vec::new() };
        samples.events.drain(..).flat_map(of).collect()
    };
    let stopped = ids(&mut samples(1, &["ND"], Sampling::default()), vec![tokens(0, b"aN"), tokens(0, b"Dx"), tokens(0, b"y")]);
    assert_eq!(stopped, b"aND".map(TokenId::from));
    let end = finished(0, finished::FinishReason::Stop, Some(257));
    assert_eq!(ids(&mut samples(1, &[], Sampling::default()), vec![tokens(0, b"a\xE2"), end]), [97, 0xE2, 257]);
}

#[test]
fn logprobs_with_tokens_cover_the_stop_string_and_the_stop_token() {
    let new = |stop: &[String]| {
        let sampling = Sampling { logprobs: Some(0), ..Sampling::default() };
        Samples::new(Arc::new(ServedModel::sim("m")), 1, stop, TextOptions::default(), &sampling, LogprobsWith::Tokens, None)
    };
    let check = |mut samples: Samples, replies: Vec<Message>, expected: &[TokenId]| {
        replies.into_iter().for_each(|reply| samples.apply(reply).expect("the replies are valid"));
        let mut found = Vec::new();
        for event in samples.events.drain(..) {
            let AnswerEvent::Delta(delta) = event else { panic!("only deltas are expected") };
            let with_logprobs: Vec<TokenId> = delta.logprobs.iter().map(|entry| entry.token).collect();
            assert_eq!(delta.token_ids, with_logprobs);
            found.extend(with_logprobs);
        }
        assert_eq!(found, expected);
    };
    check(new(&["ND".to_owned()]), vec![tokens(0, b"a\xE2"), tokens(0, b"N"), tokens(0, b"Dx")], &[97, 0xE2, 78, 68]);
    let end = Finished {
        reason: finished::FinishReason::Stop.into(),
        stop_token: Some(257),
        stop_logprobs: Some(Token { token: 257, logprob: Some(-0.25), top: Vec::new() }),
        ..Finished::default()
    };
    check(new(&[]), vec![tokens(0, b"a"), Message::Finished(end)], &[97, 257]);
    let without = finished(0, finished::FinishReason::Stop, Some(257));
    check(new(&[]), vec![tokens(0, b"a"), without], &[97, 257]);
}

#[test]
fn incomplete_character_at_the_end_becomes_a_replacement_character() {
    let mut samples = samples(1, &[], Sampling::default());
    let got =
        deltas(&mut samples, vec![tokens(0, b"a\xE2"), tokens(0, b"\x82"), finished(0, finished::FinishReason::Length, None)]);
    assert_eq!(
        got,
        [(0, "a".into(), 2, None), (0, String::new(), 1, None), (0, "\u{FFFD}".into(), 0, Some(FinishReason::Length))]
    );
}

#[test]
fn stop_strings_do_not_count_before_min_tokens() {
    let mut samples = samples(1, &["E"], Sampling { min_tokens: 2, ..Sampling::default() });
    assert_eq!(deltas(&mut samples, vec![tokens(0, b"EEaE")]), [(0, "EEa".into(), 4, Some(FinishReason::Stop))]);
}

#[test]
fn logprobs_are_sent_with_their_text_but_not_for_the_stop_string() {
    let mut samples = samples(1, &["ND"], Sampling { logprobs: Some(0), ..Sampling::default() });
    for reply in [tokens(0, "é".as_bytes()), tokens(0, b"aN"), tokens(0, b"xND")] {
        samples.apply(reply).expect("the replies are valid");
    }
    let offsets: Vec<Vec<(u32, usize)>> = samples
        .events
        .drain(..)
        .map(|event| match event {
            AnswerEvent::Delta(delta) => delta.logprobs.iter().map(|entry| (entry.token, entry.text_offset)).collect(),
            _ => panic!("only deltas are expected"),
        })
        .collect();
    let byte = |byte: u8| u32::from(byte);
    assert_eq!(offsets, [vec![(0xC3, 0), (0xA9, 0)], vec![(byte(b'a'), 1)], vec![(byte(b'N'), 2), (byte(b'x'), 3)]]);
}

#[test]
fn invalid_reply_fails_the_attempt() {
    let mut samples = samples(1, &[], Sampling::default());
    assert!(samples.apply(tokens(1, b"a")).is_err());
    assert!(samples.apply(finished(7, finished::FinishReason::Stop, None)).is_err());
    assert!(samples.apply(finished(0, finished::FinishReason::Unspecified, None)).is_err());
}

#[test]
fn token_outside_the_vocabulary_fails_the_attempt_and_does_not_count() {
    let size = ServedModel::sim("m").tokenizer.vocab_size() as u32;
    for token in [size, u32::MAX] {
        let mut samples = samples(1, &[], Sampling::default());
        let unknown = Token { token, logprob: None, top: Vec::new() };
        let reply = Message::Tokens(Tokens { sample: 0, tokens: vec![Token { token: 97, ..unknown.clone() }, unknown] });
        assert_eq!(samples.apply(reply), Err(FailureReason::EngineFailed));
        assert_eq!(samples.apply(finished(0, finished::FinishReason::Stop, Some(token))), Err(FailureReason::EngineFailed));
        assert!(samples.generated_tokens() == 0 && samples.next_event().is_none());
        samples.apply(tokens(0, &[97])).expect("the token is in the vocabulary");
    }
}
