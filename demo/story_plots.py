"""The plots of the story grammar: what happens, beat by beat, as sentence templates.

A beat is a tuple of alternatives, one of which is told. ``{hero}`` and ``{friend}`` are the two characters
(:class:`demo.story_grammar.Character`); the other slots are filled from :mod:`demo.story_words` where they first appear
and keep their value to the end of the story. Every plot introduces the friend by trait and kind, once, whichever
alternative is told. A sentence that begins in lower case is capitalised when it is told.
"""

from __future__ import annotations

from dataclasses import dataclass

Beat = tuple[str, ...]


@dataclass(frozen=True)
class Plot:
    """A plot: its beats between the opening and the closing, and the morals it may end on."""

    name: str
    beats: tuple[Beat, ...]
    morals: Beat


OPENINGS: Beat = (
    "Once upon a time, there was {hero.intro}. {hero.He} lived near {place}.",
    "Once upon a time, {hero.intro} lived in a small house near {place}.",
    "Once upon a time, in a little village, there lived {hero.intro}. {hero} was always {mood}.",
    "Once upon a time, there was {hero.intro}. {hero} liked to play {place.at}.",
    "There once was {hero.intro} who loved to be {place.at}.",
    "Long ago, {hero.intro} lived close to {place}. {hero} was always {mood}.",
    "In a small house near {place} lived {hero.intro}.",
    "{hero} was {hero.a}. Every day {hero.he} went for a walk {place.at}.",
)

CLOSING: Beat = (
    "The end.",
    "From that day on, {hero} and {friend} were the best of friends.",
    "{hero} and {friend} laughed and went home together.",
    "That night {hero} slept well and had sweet dreams.",
    "They both smiled all the way home.",
    "{hero} thanked {friend} and gave {friend.him} a big hug.",
    "And if you listen well, you can still hear {hero} and {friend} laugh.",
)

LOST_TOY = Plot(
    name="lost toy",
    beats=(
        (
            "The favorite thing of {hero} was {toy.a}.",
            "{hero} had {toy.a} and took it everywhere.",
            "{hero} had {toy.a}, a gift from {hero.his} {elder}.",
        ),
        (
            "{day}, {hero} could not find the {toy.head}.",
            "{day}, the {toy.head} was gone.",
            "But {day}, {hero} came home without the {toy.head}.",
        ),
        (
            "{hero.He} felt very sad.",
            "{hero.He} began to cry.",
            "{hero.He} looked here and there, but it was nowhere.",
            "{hero.He} did not know what to do.",
        ),
        (
            "Then {friend.intro} came by.",
            "Just then {hero.he} met {friend.intro}.",
            "{friend.A} named {friend} saw {hero.him}.",
        ),
        (
            '"Why are you so sad?" asked {friend}.',
            '"What is wrong?" asked {friend}.',
            '"Can I help you?" asked {friend}.',
        ),
        (
            '"I lost my {toy}," said {hero}.',
            '"I cannot find my {toy.head}," said {hero}.',
            '"My {toy} is gone," {hero} answered.',
        ),
        (
            '"Let us look for it together," said {friend}.',
            '"Do not worry, we will find it," said {friend}.',
            '"Four eyes see more than two," {friend} said.',
        ),
        (
            "They looked and looked.",
            "They looked in every corner.",
            "They walked up and down and asked everyone.",
        ),
        (
            "At last, {friend} found the {toy.head} {spot}.",
            "Then {friend} looked {spot}, and there was the {toy}!",
            "{friend} saw something {toy.color} {spot}. It was the {toy.head}!",
        ),
        (
            '"Hooray!" cried {hero}, and held the {toy.head} tight.',
            "{hero} jumped for joy.",
            '"Thank you, {friend}!" said {hero}.',
        ),
    ),
    morals=(
        "{hero} learned to ask friends for help.",
        "{hero} learned to take good care of {hero.his} things.",
        "",
    ),
)

SHARED_MEAL = Plot(
    name="shared meal",
    beats=(
        (
            "{day}, {hero} had {meal.a} for lunch.",
            "{day}, {hero.his} {elder} gave {hero.him} {meal.a}.",
            "{day}, {hero} sat down under a tree to eat {meal.a}.",
        ),
        (
            "{hero.He} saw {friend.intro}.",
            "Then {friend.intro} walked by.",
            "Not far away sat {friend.intro}.",
        ),
        (
            "{friend} looked hungry.",
            "{friend} had nothing to eat.",
            "{friend} was tired and hungry.",
        ),
        (
            '"Are you hungry?" asked {hero}.',
            '"Do you want some?" asked {hero}.',
            '"Would you like to eat with me?" asked {hero}.',
        ),
        (
            '"Yes, please," said {friend}.',
            '"Yes, I am very hungry," said {friend}.',
            '"Oh yes, thank you!" {friend} answered.',
        ),
        (
            "{hero} cut the {meal} into two parts and gave one to {friend}.",
            "So {hero} gave half of the {meal} to {friend}.",
            "{hero} shared the {meal} with {friend}.",
        ),
        (
            "They sat side by side and ate.",
            "It tasted even better together.",
            "{friend} smiled for the first time that day.",
        ),
        (
            "When they were done, they played {game}.",
            "After the meal, {friend} told a funny story.",
            "Then {friend} showed {hero} a secret path {place.at}.",
        ),
    ),
    morals=(
        "{hero} learned that half a meal with a friend is better than a whole meal alone.",
        "{hero} learned that it is good to share.",
        "",
    ),
)

FEAR = Plot(
    name="fear",
    beats=(
        (
            "But {hero} was afraid of {fear}.",
            "There was only one thing {hero.he} did not like, and that was {fear}.",
            "{hero.He} was almost never afraid, but {hero.he} was afraid of {fear}.",
        ),
        (
            "{day}, {hero} told {friend} about it. {friend} was {friend.a}.",
            "{day}, {friend.intro} came to visit.",
            "{day}, {hero} met {friend.intro}.",
        ),
        (
            '"I am afraid of {fear}," said {hero} in a small voice.',
            '"Please do not laugh," said {hero}, "but I am afraid of {fear}."',
        ),
        (
            '"We can be brave together," said {friend}.',
            '"I was afraid too, once," said {friend}.',
            '"That is all right, I will stay with you," {friend} said.',
        ),
        (
            "{friend} thought for a while and had an idea.",
            "Then {friend} had a good idea.",
        ),
        (
            "With {fear.remedy}, it was not so bad.",
            "{friend} helped {hero.him} with {fear.remedy}.",
            "They tried it again with {fear.remedy}.",
        ),
        (
            "After a while, {hero} was not afraid any more.",
            "Soon {hero} felt calm.",
            "{hero} took a deep breath and smiled.",
        ),
        (
            '"I did it!" said {hero}.',
            '"You are very brave," said {friend}.',
            '"It is easy when you are here," said {hero}.',
        ),
    ),
    morals=(
        "{hero} learned that it helps to talk about our fears.",
        "{hero} learned to be brave, one step at a time.",
        "",
    ),
)

NEW_FRIEND = Plot(
    name="new friend",
    beats=(
        (
            "But {hero} was new there and had no friends.",
            "But {hero} often felt alone.",
            "{hero.He} wished for a friend.",
        ),
        (
            "{day}, {hero.he} saw {friend.intro} {place.at}.",
            "{day}, {hero} met {friend.intro}.",
            "{day}, {friend.intro} moved into the house next door.",
        ),
        (
            "{hero} was shy, but {hero.he} walked over.",
            "{hero} waved at {friend.him}.",
            "At first {hero} did not dare to speak.",
        ),
        (
            '"Hello, my name is {hero}," {hero.he} said.',
            '"Hi, I am {hero}. Who are you?" {hero.he} asked.',
        ),
        (
            '"Hello {hero}, I am {friend}. Do you want to play?"',
            '"Nice to meet you, {hero}. I am {friend}. Shall we play?"',
            '"I am {friend}, and I would love to play," {friend.he} answered.',
        ),
        (
            "They played {game} until the sun went down.",
            "They played {game} all day long.",
            "They played {game} and had a lot of fun.",
        ),
        (
            "Then they shared {meal.a}.",
            "Then they sat down {place.at} and told each other stories.",
            "In the evening {hero.his} {elder} brought them {meal.a}.",
        ),
        (
            '"Will you come back tomorrow?" asked {hero}. "Of course I will!" said {friend}.',
            '"This was the best day of the year," said {hero}.',
            '"See you tomorrow!" said {friend}.',
        ),
    ),
    morals=(
        "{hero} learned that a friend is only one hello away.",
        "{hero} learned to say hello first.",
        "",
    ),
)

BROKEN_THING = Plot(
    name="broken thing",
    beats=(
        (
            "{day}, {hero} played {game} inside the house with {friend.intro}.",
            "{day}, {hero} and {friend}, {friend.a}, ran through the house.",
        ),
        (
            "Crash! {fragile.a} fell down and broke.",
            "By mistake, {hero} hit {fragile.a}, and it broke.",
            "Oh no! {hero} bumped into the table, and {fragile.a} fell to the floor.",
        ),
        (
            "The {fragile.head} belonged to {hero.his} {elder}.",
            "It was the {fragile.head} that {hero.his} {elder} loved most.",
        ),
        (
            "{hero} felt very bad.",
            "{hero} wanted to run away and hide.",
            '"What shall I do?" {hero} whispered.',
        ),
        (
            '"You should tell the truth," said {friend}.',
            '"Let us say what happened," said {friend}.',
            '"I will go with you," said {friend}.',
        ),
        (
            "So they went to see {hero.his} {elder}.",
            "{hero} was scared, but {hero.he} went to {hero.his} {elder}.",
        ),
        (
            '"I broke your {fragile.head}. I am so sorry," said {hero}.',
            '"I am sorry, I broke the {fragile}," said {hero}.',
        ),
        (
            "{hero.His} {elder} was not angry.",
            "{hero.His} {elder} gave {hero.him} a hug.",
            "{hero.His} {elder} looked at {hero.him} and smiled.",
        ),
        (
            '"Thank you for telling the truth," {elder.he} said.',
            '"It is only a {fragile.head}, and we can fix it together," {elder.he} said.',
            '"That was brave of you," {elder.he} said.',
        ),
        (
            "They all sat down and fixed the {fragile.head}.",
            "Then they got some glue, and soon the {fragile.head} was whole again.",
        ),
    ),
    morals=(
        "{hero} learned that it is good to tell the truth.",
        "{hero} learned to be honest, even when it is hard.",
        "",
    ),
)

GIFT = Plot(
    name="gift",
    beats=(
        (
            "{day}, it was the birthday of {friend.intro}.",
            "{hero} had a friend, {friend.intro}. {day}, {friend} had a birthday.",
        ),
        (
            "{hero} wanted to give {friend.him} something nice, but {hero.he} had no money.",
            "{hero} did not have a gift yet.",
        ),
        (
            "{hero.He} thought and thought.",
            '"What can I give?" {hero.he} asked {hero.his} {elder}.',
            "{hero.He} walked around {place.at} and thought about it.",
        ),
        (
            "Then {hero} made {toy.a} out of {material}.",
            "So {hero.he} worked all day and made {toy.a} out of {material}.",
        ),
        (
            "{hero.He} also baked {meal.a}.",
            "It took a long time.",
            "It was not perfect, but it was pretty.",
            "{hero.He} put it in a box with a ribbon.",
        ),
        (
            "{friend} opened the box and saw the {toy.head}.",
            "When {friend} saw the {toy.head}, {friend.he} jumped for joy.",
        ),
        (
            '"This is the best {toy.head} I ever had!" said {friend}.',
            '"You made this for me? Thank you!" said {friend}.',
            '"What a lovely {toy}!" said {friend}.',
        ),
        (
            "They played with it until it was dark.",
            "{friend} kept it next to the bed for many years.",
            "All the guests wanted to see it.",
        ),
    ),
    morals=(
        "{hero} learned that the best gifts are made by hand.",
        "{hero} learned that a gift from the heart needs no money.",
        "",
    ),
)

RESCUE = Plot(
    name="rescue",
    beats=(
        (
            "{day}, {hero} heard a cry for help.",
            "{day}, {hero} went out and heard a small voice.",
            "{day}, somebody called for help {place.at}.",
        ),
        (
            "{friend.A} named {friend} was stuck {trap}.",
            "It was {friend}, {friend.a}, stuck {trap}.",
        ),
        (
            '"Please help me!" cried {friend}.',
            '"I cannot get out!" cried {friend}.',
            '"Help, I am stuck!" cried {friend}.',
        ),
        (
            '"Stay calm, I will help you," said {hero}.',
            '"Do not move, I am coming," said {hero}.',
            '"I have an idea," said {hero}.',
        ),
        (
            "{hero.He} {trap.deed}.",
            "{hero} thought for a moment. Then {hero.he} {trap.deed}.",
            "{hero} ran to get {hero.his} {elder}. Together they {trap.deed}.",
        ),
        (
            "Soon {friend} was free.",
            "Slowly, {friend} came out.",
            "It worked, and {friend} was safe.",
        ),
        (
            '"Thank you, you saved me!" said {friend}.',
            '"You are so brave!" said {friend}.',
            '"I will never forget this," said {friend}.',
        ),
        (
            "They went to the house of {hero} and ate {meal.a}.",
            "To say thank you, {friend} gave {hero} {toy.a}.",
            "Then they rested a while {place.at}.",
        ),
    ),
    morals=(
        "{hero} learned to stay calm and use {hero.his} head.",
        "{hero} learned that it feels good to help.",
        "",
    ),
)

SEED = Plot(
    name="seed",
    beats=(
        (
            "{day}, {hero.his} {elder} gave {hero.him} a tiny seed.",
            "{day}, {hero} found a tiny seed {place.at}.",
        ),
        (
            "{hero} put it in the ground and gave it water.",
            "{hero} dug a small hole and planted it.",
        ),
        (
            "The next day, nothing had changed.",
            "But nothing came up.",
            "{hero} waited all day, but the seed did not grow.",
        ),
        (
            '"Why does it not grow?" asked {hero}.',
            '"Maybe it is a bad seed," said {hero}.',
            '"I do not like to wait," said {hero}.',
        ),
        (
            "{friend.A} named {friend} sat down next to {hero.him}.",
            "Then {friend.intro} came by and looked at the ground.",
        ),
        (
            '"You have to wait a little," said {friend}.',
            '"Good things take time," said {friend}.',
            '"Give it water and sun," said {friend}.',
        ),
        (
            "{hero} gave it water every day.",
            "Days went by, and then weeks.",
            "So {hero} waited, and {friend} waited too.",
        ),
        (
            "Then, one fine morning, there was a small green leaf.",
            "At last, a green leaf came out of the ground.",
        ),
        (
            "In the summer, there was a big yellow flower.",
            "It grew and grew until it was taller than {hero}.",
            "It grew into a fine little tree.",
        ),
        (
            '"It is beautiful!" said {hero}.',
            '"You see?" said {friend}. "It was a good seed."',
            "{hero} and {friend} danced around it.",
        ),
    ),
    morals=(
        "{hero} learned to wait and to care.",
        "{hero} learned to work a little each day.",
        "",
    ),
)

RAINY_DAY = Plot(
    name="rainy day",
    beats=(
        (
            "{hero} had a friend, {friend.intro}. One day, they wanted to go out and play.",
            "One day, {hero} planned a trip with {friend.intro}.",
        ),
        (
            "But it began to rain.",
            "But dark clouds came, and it rained hard.",
            "But the wind was strong and the rain was cold.",
        ),
        (
            "{hero} looked out of the window and was sad.",
            '"Now the day is lost," said {hero}.',
            '"I do not like the rain," said {hero}.',
        ),
        (
            '"We can play {game} inside," said {friend}.',
            '"Let us play {game} here," said {friend}.',
        ),
        (
            "So they played {game} on the floor.",
            "They made a fire and played {game}.",
            "They played {game} again and again, and {hero.he} won twice.",
        ),
        (
            "Then they ate {meal.a} and told stories.",
            "{hero.His} {elder} made hot milk, and they shared {meal.a}.",
        ),
        (
            "When the rain stopped, there was a rainbow in the sky.",
            "In the evening the sun came out again.",
            "Outside it rained, but inside it was warm.",
        ),
        (
            '"I think I like the rain after all," said {hero}.',
            '"What a fine day it was!" said {hero}.',
            '"Let us do this again," said {friend}.',
        ),
    ),
    morals=(
        "{hero} learned to make the best of a bad day.",
        "{hero} learned that a friend is as good as the sun.",
        "",
    ),
)

LEARNING = Plot(
    name="learning",
    beats=(
        (
            "{hero} wanted to learn {skill}.",
            "More than anything, {hero} wanted to learn {skill}.",
        ),
        (
            "{day}, {hero.he} tried it for the first time, but {hero.he} {skill.failure}.",
            "{day}, {hero.he} tried, and {hero.he} {skill.failure}.",
        ),
        (
            '"I will never learn it," said {hero}.',
            "{hero.He} was angry and wanted to give up.",
            '"This is too hard for me," said {hero}.',
        ),
        (
            "{friend.A} named {friend} had seen it all.",
            "Then {friend.intro} came over.",
        ),
        (
            '"I was just as bad when I began," said {friend}.',
            '"Try it again, I will show you," said {friend}.',
            '"You only have to try a little longer," said {friend}.',
        ),
        (
            "So they tried it every day {place.at}.",
            "{hero} tried again, slowly and with care.",
            "Every day {hero} got a little better.",
        ),
        (
            "And then, one fine day, {hero} {skill.success}.",
            "At last, {hero} {skill.success}.",
        ),
        (
            '"Look at me!" cried {hero}.',
            '"I knew you could do it," said {friend}.',
            "{friend} clapped, and everyone cheered.",
        ),
        (
            "{hero.His} {elder} was very proud.",
            "They had {meal.a} to celebrate.",
        ),
    ),
    morals=(
        "{hero} learned to try again.",
        "{hero} learned that nobody is good at first.",
        "",
    ),
)

WAY_HOME = Plot(
    name="way home",
    beats=(
        (
            "{day}, {hero} went for a long walk {place.at}.",
            "{day}, {hero} followed a butterfly for a long time.",
        ),
        (
            "After a while, {hero.he} did not know the way home.",
            "Soon all the paths looked the same, and {hero.he} was lost.",
        ),
        (
            "It was getting dark.",
            "The sun went down, and the wind was cold.",
            "{hero} sat down on a stone and cried.",
        ),
        (
            "Then {hero.he} saw a light. It was {friend.intro}, with a lantern.",
            "Then {friend.intro} came down the path.",
        ),
        (
            '"Where do you live?" asked {friend}.',
            '"Are you lost?" asked {friend}.',
        ),
        (
            '"I live near {place}," said {hero}.',
            '"I want to go home to my {elder}," said {hero}.',
        ),
        (
            '"I know the way. Take my hand," said {friend}.',
            '"Come with me, it is not far," said {friend}.',
        ),
        (
            "They walked past the old tree and over the bridge.",
            "They looked at the stars and found the way.",
            "They sang a song, and the dark was not so dark any more.",
        ),
        (
            "{hero.His} {elder} stood at the door and was very happy.",
            "At last, {hero} saw the lights of {hero.his} house.",
        ),
        (
            "Everyone had a bowl of hot soup.",
            '"Please stay for dinner," said {hero} to {friend}.',
            "{friend} stayed for the night, and in the morning they had {meal.a}.",
        ),
    ),
    morals=(
        "{hero} learned to stay on the path.",
        "{hero} learned that help may come when it is dark.",
        "",
    ),
)

RACE = Plot(
    name="race",
    beats=(
        (
            "{day}, there was a big race {place.at}.",
            "{day}, everyone came to see the big race {place.at}.",
        ),
        (
            "{hero} wanted to win, and so did {friend.intro}.",
            "Next to {hero} stood {friend.intro}, who was very fast.",
        ),
        (
            '"Ready, set, go!" called {hero.his} {elder}.',
            "A bell rang, and off they went.",
        ),
        (
            "{friend} was faster and soon was far ahead.",
            "At first {friend} was ahead.",
        ),
        (
            "But then {friend} fell over a root and hurt {friend.his} foot.",
            "But then {friend} fell down and could not get up.",
        ),
        (
            "{hero} could have won, but {hero.he} stopped.",
            "{hero} did not run past. {hero.He} stopped.",
        ),
        (
            '"Lean on me," said {hero}.',
            '"Are you hurt? Let me help you," said {hero}.',
        ),
        (
            "Side by side, they walked to the end of the race.",
            "Slowly, they walked on together.",
        ),
        (
            "They came in last, but everyone cheered.",
            "They did not win, but everyone clapped for them.",
        ),
        (
            '"You could have won," said {friend}. "I won a friend," said {hero}.',
            "{hero.His} {elder} gave them {meal.a} as a prize.",
            "Each of them got {toy.a} as a prize.",
        ),
    ),
    morals=(
        "{hero} learned that a friend is worth more than a prize.",
        "{hero} learned that winning is not everything.",
        "",
    ),
)

PLOTS: tuple[Plot, ...] = (
    LOST_TOY,
    SHARED_MEAL,
    FEAR,
    NEW_FRIEND,
    BROKEN_THING,
    GIFT,
    RESCUE,
    SEED,
    RAINY_DAY,
    LEARNING,
    WAY_HOME,
    RACE,
)
