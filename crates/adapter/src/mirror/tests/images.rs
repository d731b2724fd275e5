//! Blocks with images.

use super::*;

#[test]
fn images_are_part_of_the_hashes_of_the_blocks_in_which_they_begin() {
    let (prompt, id) = (tokens(1, 3), ImageId([7; 32]));
    // The image begins at the last token of the first engine block, which is in that block's last Tandem block, and ends in the third.
    let begins = ImageStart { at: ENGINE_BLOCK - 1, id };
    let blocks = |salted: &[ImageStart], second: ExtraKeys| {
        let salt = Some(cache_salt(&KEY, &namespace()));
        let extra_keys = vec![ExtraKeys::Images { salt, images: salted.to_vec() }, second, ExtraKeys::None];
        EngineEvent::Stored(BlocksStored { extra_keys, ..first_blocks(&[1, 2, 3], prompt.clone()) })
    };
    let continued = || ExtraKeys::Images { salt: None, images: Vec::new() };
    let mut mirror = mirror_with(|settings| settings.device_blocks = 100);
    mirror.apply(&[blocks(&[begins], continued())]);
    let expected = child_hashes(&KEY, namespace().root(&KEY), BLOCK, &prompt, &[begins]);
    assert_eq!(changes(&mut mirror), [stored(None, &expected)]);
    let cached = |mirror: &Mirror, images: &[ImageStart]| mirror.cached_prefix(&namespace(), &prompt, images)[0] as usize;
    assert_eq!(cached(&mirror, &[begins]), 3 * K);
    // The blocks before the image are those of every prompt with these tokens.
    let others =
        [vec![], vec![ImageStart { at: ENGINE_BLOCK - 1, id: ImageId([8; 32]) }], vec![ImageStart { at: ENGINE_BLOCK - 2, id }]];
    for images in others {
        assert_eq!(cached(&mirror, &images), K - 1, "{images:?}");
    }
    assert_eq!(mirror.unroutable(), &Unroutable::default());
    // Another image at the same place, in blocks with other hashes of the engine.
    let other = ImageStart { id: ImageId([9; 32]), ..begins };
    let EngineEvent::Stored(of_other) = blocks(&[other], continued()) else { panic!("the event stores blocks") };
    mirror.apply(&[EngineEvent::Stored(BlocksStored { hashes: [4, 5, 6].map(number).to_vec(), ..of_other })]);
    assert_eq!((cached(&mirror, &[begins]), cached(&mirror, &[other])), (3 * K, 3 * K));
    // An offset beyond the block, which only a broken engine sends, has no effect on this block.
    let beyond = ImageStart { at: usize::MAX, id };
    assert_eq!(child_hashes(&KEY, namespace().root(&KEY), BLOCK, &prompt, &[beyond]), hashes(&prompt));
}

#[test]
fn images_of_an_approximate_mirror_separate_prompts() {
    let (prompt, image) = (tokens(1, 2), |id| [ImageStart { at: 1, id: ImageId([id; 32]) }]);
    let mut mirror = mirror();
    mirror.assume_stored(&namespace(), &prompt, &image(1));
    let cached = |images: &[ImageStart]| mirror.cached_prefix(&namespace(), &prompt, images)[0] as usize;
    assert_eq!((cached(&image(1)), cached(&image(2)), cached(&[])), (2 * K, 0, 0));
}
