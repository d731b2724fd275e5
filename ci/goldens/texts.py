"""The texts from which the golden files are made. They were written for this purpose or are in the public domain."""

DOCUMENTS = [
    # Lincoln's Gettysburg Address of 1863, and a continuation.
    """Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, and dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war, testing whether that nation, or any nation so conceived and so dedicated, can long endure. We are met on a great battle-field of that war. We have come to dedicate a portion of that field, as a final resting place for those who here gave their lives that that nation might live. It is altogether fitting and proper that we should do this. But, in a larger sense, we can not dedicate -- we can not consecrate -- we can not hallow -- this ground. The brave men, living and dead, who struggled here, have consecrated it, far above our poor power to add or detract. The world will little note, nor long remember what we say here, but it can never forget what they did here. It is for us the living, rather, to be dedicated here to the unfinished work which they who fought here have thus far so nobly advanced.""",
    # An explanation, written for this purpose.
    """A cache is a small, fast memory that keeps copies of things which were expensive to get. When a program asks for something, the cache is asked first. If the copy is there, the answer comes quickly; this is called a hit. If it is not, the slow path is taken and the result is stored for the next time; this is called a miss. The difficult part is not storing things but deciding what to throw away. The most common rule removes what has not been used for the longest time. It is simple, and it works well because programs tend to use again what they used a short while ago. The second difficult part is knowing when a copy is no longer true. If the original changes and the copy does not, the program computes with old facts. Some caches solve this by naming each copy after its contents: a different content has a different name, so a copy can never be wrong, only useless.

Memory in a computer is arranged in levels. Close to the processor are a few kilobytes that answer within a nanosecond. Behind them are megabytes which take ten times as long, then gigabytes which take a hundred times as long, and finally disks and networks, which are slower still. Each level is a cache of the one behind it. A programmer who knows this arranges data so that what is used together lies together. Often this makes more of a difference than a cleverer algorithm.""",
    # Code, written for this purpose.
    '''```python
def fibonacci(n):
    """Return the n-th Fibonacci number."""
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a

class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def __len__(self):
        return len(self.items)

def main():
    stack = Stack()
    for i in range(10):
        stack.push(fibonacci(i))
    while len(stack) > 0:
        print(stack.pop())

if __name__ == "__main__":
    main()
```

The program above prints the first ten Fibonacci numbers in reverse order: 34, 21, 13, 8, 5, 3, 2, 1, 1, 0. It does so because a stack returns the last item first.''',
    # A conversation in the model's own format.
    """<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
I have three apples and I buy two bags with five apples each. Then I give four apples to my neighbour. How many do I have?<|im_end|>
<|im_start|>assistant
You start with 3 apples. Two bags with 5 apples each are 10 apples, so you have 3 + 10 = 13 apples. After giving 4 apples to your neighbour you have 13 - 4 = 9 apples.<|im_end|>
<|im_start|>user
Write a short letter that thanks my teacher.<|im_end|>
<|im_start|>assistant
Dear Mrs. Green,

Thank you for everything you have taught me this year. Your lessons were always clear, and you were patient when I did not understand something the first time. Because of you I now enjoy reading much more than before.

I hope you have a wonderful summer.

Sincerely,
Anna<|im_end|>
<|im_start|>user
What is the capital of France, and what is it known for?<|im_end|>
<|im_start|>assistant
The capital of France is Paris. It is known for the Eiffel Tower, the Louvre museum, its cafés and its long history as a centre of art, fashion and science.<|im_end|>
""",
    # One long document: Austen (1813), Melville (1851), Carroll (1865), Dickens (1859), the US constitution's preamble (1787), Shakespeare,
    # and prose written for this purpose.
    """It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this truth is so well fixed in the minds of the surrounding families, that he is considered as the rightful property of some one or other of their daughters. "My dear Mr. Bennet," said his lady to him one day, "have you heard that Netherfield Park is let at last?" Mr. Bennet replied that he had not. "But it is," returned she; "for Mrs. Long has just been here, and she told me all about it." Mr. Bennet made no answer. "Do not you want to know who has taken it?" cried his wife impatiently. "You want to tell me, and I have no objection to hearing it." This was invitation enough.

Call me Ishmael. Some years ago -- never mind how long precisely -- having little or no money in my purse, and nothing particular to interest me on shore, I thought I would sail about a little and see the watery part of the world. It is a way I have of driving off the spleen and regulating the circulation. Whenever I find myself growing grim about the mouth; whenever it is a damp, drizzly November in my soul; whenever I find myself involuntarily pausing before coffin warehouses, and bringing up the rear of every funeral I meet; and especially whenever my hypos get such an upper hand of me, that it requires a strong moral principle to prevent me from deliberately stepping into the street, and methodically knocking people's hats off -- then, I account it high time to get to sea as soon as I can.

Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, "and what is the use of a book," thought Alice "without pictures or conversations?" So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy and stupid), whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking the daisies, when suddenly a White Rabbit with pink eyes ran close by her. There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear the Rabbit say to itself, "Oh dear! Oh dear! I shall be late!"

It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing before us, we were all going direct to Heaven, we were all going direct the other way.

We the People of the United States, in Order to form a more perfect Union, establish Justice, insure domestic Tranquility, provide for the common defence, promote the general Welfare, and secure the Blessings of Liberty to ourselves and our Posterity, do ordain and establish this Constitution for the United States of America.

To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer the slings and arrows of outrageous fortune, or to take arms against a sea of troubles and by opposing end them. To die, to sleep, no more; and by a sleep to say we end the heart-ache and the thousand natural shocks that flesh is heir to.

The harbour lay quiet under the morning fog. Two boats had gone out before dawn and had not come back, and the women on the quay spoke little. Old Marten sat on his crate, mending a net that needed no mending. "They know the water," he said to nobody. A gull landed, looked at him, and left. Towards nine the fog began to lift, first from the mast tops, then from the roofs, and at last from the sea itself, and there, small and black against the light, were two sails. Nobody cheered. The children ran to the end of the pier, the women went home to light their stoves, and Marten put the net aside and closed his eyes.

The mill stood where the river bent. For a hundred years it had ground the corn of three villages, and for twenty it had ground nothing at all. When the young couple from the city bought it, people shook their heads. They repaired the roof in the first summer, the wheel in the second, and in the third they baked bread from flour of their own. In the fourth summer there was a queue at the door every morning, and those who had shaken their heads stood in it like everybody else.""",
    # Lists, numbers, a table and a recipe, written for this purpose.
    """# Pancakes

Ingredients for 4 people:
- 250 g flour
- 2 eggs
- 500 ml milk
- 1 pinch of salt
- 2 tablespoons of butter

1. Put the flour and the salt into a bowl.
2. Add the eggs and half of the milk and stir until the dough is smooth.
3. Stir in the rest of the milk and let the dough rest for 20 minutes.
4. Melt a little butter in a pan and bake the pancakes until both sides are golden.

| City | Country | Population |
|---|---|---|
| Berlin | Germany | 3,700,000 |
| Madrid | Spain | 3,300,000 |
| Rome | Italy | 2,800,000 |
| Vienna | Austria | 1,900,000 |

The planets of the solar system, from the Sun outwards, are Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune. Light from the Sun takes about 8 minutes to reach the Earth, and more than 4 hours to reach Neptune. 2 + 2 = 4, 12 * 12 = 144, 1000 / 8 = 125.""",
    # Other languages, written for this purpose.
    """Bonjour, je m'appelle Marie et j'habite à Lyon. Le matin, je prends le train pour aller au travail. Le soir, je lis un livre ou je regarde un film avec mes amis. Guten Tag, ich heiße Peter und wohne in Hamburg. Am Wochenende fahre ich oft mit dem Fahrrad an die Elbe. Hola, me llamo Lucía y vivo en Sevilla. En verano hace mucho calor y todos salimos por la noche.""",
]

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "The first law of thermodynamics states that",
    "def quicksort(items):\n",
    "Water boils at",
    "The three primary colours are",
    "To make a good cup of tea, first",
    "In 1969, the first humans",
    "The quick brown fox",
    "Photosynthesis is the process by which",
    "A prime number is a number that",
    "1, 2, 3, 4, 5, 6,",
    "The largest planet of the solar system is",
    "Dear Sir or Madam,\n\nI am writing to",
    "SELECT name, age FROM users WHERE",
    "The difference between weather and climate is that",
    "My favourite season is autumn because",
    "#include <stdio.h>\n\nint main(void) {\n",
    "The human heart has",
    "It was a dark and stormy night;",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nName three animals that live in the sea.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about the moon.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nHow do I boil an egg?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhat is 7 times 8?<|im_end|>\n<|im_start|>assistant\n",
    "Le chat est sur",
    "The Roman Empire fell because",
    "Computers store numbers as",
]

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<gh_stars>", "<issue_start>",
            "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>", "<jupyter_code>", "<jupyter_output>", "<jupyter_script>", "<empty_output>"]

_PLAIN = [
    "", " ", "  ", "   ", "    ", "\n", "\n\n", "\n\n\n", "\t", "\t\t", "\r", "\r\n", "\r\n\r\n", " \n", "\n ", " \n ", "\t \n", "a", "A", "ab", " a", "a ", " a ", "  a", "a  ", "  a  ",
    "Hello", "Hello, world!", "hello world", "HELLO WORLD", "HeLLo WoRLD", "Hello  world", "Hello   world", "Hello\nworld", "Hello\n\nworld", "Hello\tworld", "Hello \n world",
    "I'm", "you're", "he's", "we've", "they'll", "she'd", "don't", "I'M", "YOU'RE", "HE'S", "WE'VE", "THEY'LL", "SHE'D", "DON'T", "it's its' 's 't", "o'clock", "rock 'n' roll", "'tis", "''", "'", "' s", "'sun", "’s it’s",
    "0", "1", "12", "123", "1234", "12345", "1234567890", " 1", " 12", "1 2", "1,234,567.89", "3.14159", "-42", "+1", "1e10", "0x1F", "1st 2nd 3rd", "2024-01-31", "12:34:56", "a1b2c3", "abc123def", "½ ¾ ²³", "١٢٣", "१२३", "一二三", "Ⅳ", "①②③", "𝟙𝟚𝟛", "1\u20631",
    ".", "..", "...", "....", "!", "!!", "!!!", "?", "?!", ",", ";", ":", "-", "--", "---", "_", "__init__", "#", "##", "###", "@", "$", "$100", "100%", "^", "&", "&&", "*", "**", "***", "(", ")", "()", "[]", "{}", "{{}}", "<", ">", "<>", "</", "/>", "/", "//", "\\", "\\\\", "|", "||", "~", "`", "```", "\"", "\"\"", "“quoted”", "‘quoted’", "«guillemets»", "—", "–", "…", "•", "·", "§", "©", "®", "™", "€", "£", "¥", "₿",
    "def f(x):\n    return x + 1\n", "for (int i = 0; i < 10; ++i) { sum += a[i]; }", "<div class=\"x\">text</div>", "fn main() {\n    println!(\"{}\", 42);\n}\n", "SELECT * FROM t WHERE a='b';", "if (a && b || !c) { }", "x = y ** 2 // 3", "{\"key\": [1, 2, null, true]}", "#!/bin/sh\nset -e\n", "http://example.com/a?b=c&d=e#f", "user@example.com", "C:\\path\\file.txt", "/usr/local/bin", "--flag=value", "a->b::c", "\t\tif x:\n\t\t\tpass", "        indented", "    def f():\n        pass\n\n\n", "camelCaseWord", "snake_case_word", "SCREAMING_SNAKE", "kebab-case-word",
    "é", "e\u0301", "naïve café", "nai\u0308ve cafe\u0301", "Ångström", "A\u030angstro\u0308m", "ñandú", "Straße", "ẞ", "ﬁ ﬂ", "ſ", "İstanbul ıi", "Łódź", "žluťoučký kůň", "Ænima", "œuvre", "à la carte", "o\u0302\u0323", "Z\u0351\u036b\u0343alg\u0322o\u0321", "\u0301", " \u0301a", "q\u0307\u0323",
    "Привет, мир!", "Γειά σου Κόσμε", "Շdelays", "გამარჯობა", "你好,世界", "你好,世界!", "漢字かな交じり文", "こんにちは", "カタカナ", "ハンカク", "안녕하세요", "안녕", "한\u200b글", "繁體中文測試", "中文English混合123", "日本語 と English", "สวัสดีชาวโลก", "नमस्ते दुनिया", "வணக்கம்", "ສະບາຍດີ", "ជំរាបសួរ", "မင်္ဂလာပါ", "ሰላም", "ᓄᓇᕗᑦ",
    "مرحبا بالعالم", "שלום עולם", "שָׁלוֹם", "مَرْحَبًا", "\u202bשלום\u202c abc", "abc \u200fעברית\u200e def", "سلام ۱۲۳", "ﷺ",
    "😀", "😀😀", " 😀", "😀 ", "👍🏽", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "❤️", "☀", "☀️", "♥", "✓✔✗", "→←↑↓", "∀x∈ℝ: x²≥0", "∑∏∫√∞≈≠≤≥", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "𝐛𝐨𝐥𝐝", "░▒▓█", "┌─┐│└┘", "♔♕♖", "🀄", "\U0001F9D1\u200d\U0001F4BB", "ಠ_ಠ", "¯\\_(ツ)_/¯",
    "\u00a0", "a\u00a0b", "\u2003", "a\u2003b", "\u3000", "全角\u3000空白", "\u200b", "a\u200bb", "\u200d", "\ufeff", "\ufeffBOM", "\u2028", "a\u2028b\u2029c", "\u0085", "\u1680", "\u00ad", "\x01", "\x02\x03", "\x07bell", "\x08", "\x0b", "\x0c", "\x1b[31mred\x1b[0m", "\x1f", "\x7f", "\x80\x9f", "\ufffd", "\ufffe", "\uffff", "\ue000", "\U0010ffff", "\U000e0041",
    "The quick brown fox jumps over the lazy dog.", "THE QUICK BROWN FOX", "It was the best of times, it was the worst of times.", "supercalifragilisticexpialidocious", "Donaudampfschifffahrtsgesellschaftskapitän", "antidisestablishmentarianism", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "ababababababababab", "AAAAaaaaAAAAaaaa", "zzzzzzzzzzzzzz", "qwrtpsdfghjklzxcvbnm", "The the THE tHe", "word-word--word---word", "a.b.c.d", "a,b,c,d", "a;b:c", "e.g. i.e. etc.", "Mr. Smith's dog", "U.S.A.", "Ph.D.", "C++ C# F#", "AT&T", "R&D", "24/7", "50/50", "1/2", "x^2 + y^2 = z^2", "E=mc^2", "H2O CO2", "ÄÖÜäöüß", " leading", "trailing ", "  two leading", "trailing two  ", "tab\there", "multi\nline\ntext\n", "a\n\n\n\nb", "a\n \n \nb", "a    b     c      d", "\n\n  x", "x \n\n\n", "   \n   ", "\n\t\n\t", " \t \t ",
    "<|im_start|", "|im_end|>", "<|im_ start|>", "< |im_start|>", "<|IM_START|>", "<|unknown|>", "<s>", "</s>", "[INST]", "<pad>", "<unk>", "<0x0A>", "Ġ", "Ġhello", "Ċ", "ĠĠ", "â", "ÃĢ", "▁", "▁hello", "##ing",
]

_WITH_SPECIALS = SPECIALS + [
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_start|>b", "a <|im_start|> b", "a  <|im_start|>  b", "\n<|im_end|>\n", "<|im_start|><|im_end|>", "<|im_start|><|im_start|>", "<<|im_start|>>", "<|im_start|>1", "1<|endoftext|>2", "x<|endoftext|>", "<|endoftext|>x",
    "<|endoftext|><|endoftext|>", "text<file_sep>more", "<repo_name>a/b<file_sep>c.py\nprint(1)", "it's<|im_end|>'s", "é<|im_end|>é", "😀<|im_end|>😀", "<gh_stars>10", "  <|im_end|>", "<|im_end|>  ", "\t<|im_end|>\t", "<|im_<|im_end|>start|>", "<|im_start|>user\n<|im_start|> <|im_end|>",
    "<jupyter_start><jupyter_code>x = 1\n<jupyter_output>1\n<empty_output>", "<issue_start>a<issue_comment>b<issue_closed>",
]

_LONG = ["".join(DOCUMENTS[1:2]), "word " * 300, "1234567890" * 60, "日本語テキスト。" * 60, "🙂" * 100, "a b\n" * 150, " " * 200, "\n" * 90, "x" * 700, "Hello, 世界! Привет 123 <|im_end|> 😀 it's\n\t" * 12]


def tokenizer_cases():
    """Returns pairs (text, special). If `special`, the text of special tokens becomes special tokens; texts with such tokens occur in both
    ways."""
    cases = [(text, False) for text in _PLAIN + _LONG]
    for text in _WITH_SPECIALS:
        cases += [(text, True), (text, False)]
    cases += [(text, True) for text in _LONG[-1:] + ["Hello, world!", "", " ", "1234 😀", "<|im_start|", "<s>"]]
    return cases
